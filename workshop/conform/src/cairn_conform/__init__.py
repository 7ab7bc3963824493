"""
A suite from outside: does a server of OpenAI's chat completions give on a cache hit what it gives
on a miss, and does it keep the promises around that?

Rules of this package:

1. It knows HTTP and nothing of Cairn's inside: no row may look at a journal or at a module of the
   engine. What holds for Cairn is asked of every server in the same way.
2. A server is not blamed for what it does not tell. Then texts are compared, and the row says so.
3. Everything ends: each request has a deadline, and each row asks a number of times that is known.

Read ``rows_of_cache.py`` and ``rows_of_protocol.py`` for what is asked, ``case.py`` for how a row
asks and judges. What is compared, and the HTTP, are in ``cairn.ops.outside``.
"""
