"""
`ops conform`: tests any server with OpenAI's chat completions from outside. Does a cache hit give
the same answer as a miss, and does the server do what its clients rely on?

Rules of this package:

1. It uses HTTP and knows nothing else about Cairn: no row reads a journal or imports the engine.
   Every server gets the same requests.
2. What a server does not report is not counted against it. In that case texts are compared, and the
   row says so.
3. Everything ends: each request has a deadline, and each row sends a bounded number of requests.

``rows_of_cache`` and ``rows_of_protocol`` hold the rows, ``case`` what a row can do, ``client`` the
HTTP, and ``client_answers`` the comparison of answers.
"""
