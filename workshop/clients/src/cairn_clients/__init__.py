"""
Run real clients against a Cairn server, the way their users run them.

``cairn_clients.real_clients`` drives them.

``packages`` installs them, ``alone`` keeps them off the network, ``processes`` starts and stops
them, ``scripted`` makes a model that calls their tools, ``coding`` and ``sdks`` hold the
conversations, and ``figures`` reads the results from the journal.
"""
