"""
Real clients, each as people run it, against a server of Cairn's: what ``tools/real_clients.py``
drives.

``packages`` gets them, ``alone`` keeps them off the network, ``processes`` runs and ends them,
``scripted`` makes a model that calls their tools, ``coding`` and ``sdks`` hold the conversations,
and ``figures`` reads from the journal what became of them.
"""
