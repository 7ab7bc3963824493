"""
A server as it is seen from outside, by any client of OpenAI's chat completions: what `ops conform`
and `ops bench` have in common.

It knows HTTP, and nothing of who serves. `client` asks, `answers` is what comes and where two
answers differ, `texts` is what is said.
"""
