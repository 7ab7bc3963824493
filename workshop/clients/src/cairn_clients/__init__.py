"""
Real clients, each as people run it, against a Cairn server.

``cairn_clients.real_clients`` drives them.

``packages`` gets them, ``alone`` keeps them off the network, ``processes`` runs and ends them,
``scripted`` makes a model that calls their tools, ``coding`` and ``sdks`` hold the conversations,
and ``figures`` reads from the journal what became of them.
"""
