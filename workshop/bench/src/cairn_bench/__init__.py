"""
`ops bench`: measures Cairn and other servers on the same model and machine, in one run.

Read ``scenarios`` first (what clients send), then ``servers`` (how servers are started), ``runs``
(one scenario on one server, and when it counts), ``plan`` (the order), and ``report``. Requests
are sent and timed by ``cairn_conform.client``.

Rules of this package:

1. Only ratios count. Each figure of Cairn has the other server's figure from the same run.
2. A run without cache hits, or whose warm answer differs from the cold one, is an error.
3. While one server is measured, no other is working.
4. Requests go to the loopback only, and every server that the benchmark starts ends with it.
"""
