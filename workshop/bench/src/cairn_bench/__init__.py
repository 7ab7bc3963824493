"""
`ops bench`: Cairn beside other servers, on the same model, machine and footing, in one run.

Read ``scenarios`` first (what clients do), then ``servers`` (who is asked), ``runs`` (one scenario
on one server, and what makes it a result at all), ``plan`` (in which order), and ``report``. How a
request is made and timed is in ``cairn.ops.outside``.

Rules of this package:

1. Ratios count. Each figure of ours has the peer's beside it, measured in the same run.
2. A run in which nothing was reused, or in which a warm answer is not the cold one, is an error and
   no result.
3. No server is at work while another is measured.
4. Only the loopback is talked to, and every server that was started here ends here.
"""
