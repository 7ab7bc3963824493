"""
How Pebble, the built-in model, is made: dialogues from a seed, training, evaluation, export.

Read in this order: ``words`` (what sentences are made of), ``dialogues`` (what Pebble learns to
do), ``small_talk`` (what it says of itself), ``phrasings`` and ``everyday`` (the same as people say
it, and what was never told), ``written_tools`` (tools as people write them), ``sequences``
(dialogues as tokens with weights), ``recipe``, ``training``, ``judges``, ``evaluation`` (what it
can do, on what it has not seen), ``by_hand`` (and in words that no template has), ``export``.
"""
