"""
The HTTP border: one adapter for each protocol, one place for errors.

``service`` says what is asked of the actors, ``app`` has the routes, ``openai`` and
``openai_answers`` speak OpenAI's chat completions, ``errors`` tells clients what went wrong.
"""
