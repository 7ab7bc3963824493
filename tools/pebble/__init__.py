"""
How Pebble, the built-in model, is made: dialogues from a seed, training, evaluation, export.

Read in this order: ``words`` (what sentences are made of), ``dialogues`` (what Pebble learns to
do), ``small_talk`` (what it says of itself), ``sequences`` (dialogues as tokens with weights),
``training``, ``evaluation`` (what it can do, on what it has not seen), ``export``.
"""
