"""
How Pebble, the built-in model, is made: dialogues from a seed, training, evaluation, export.

Read in this order: ``words`` (the parts of sentences), ``dialogues`` (what Pebble learns to do),
``small_talk`` (what it says about itself), ``phrasings`` and ``everyday`` (the same skills in
everyday words, and questions about facts never given), ``written_tools`` (tools as developers write
them), ``sequences`` (dialogues as tokens with weights), ``recipe``, ``training``, ``judges``,
``first_messages`` and ``typed`` (openings as people type them), ``evaluation`` (skills measured on
held-out data), ``by_hand`` (and on hand-written examples outside all templates), ``export``,
``first_chat`` (a stranger's openings, judged by people).
"""
