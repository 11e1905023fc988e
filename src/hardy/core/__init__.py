"""The algorithm: tensors and who owns them, one client, one server, one round. It imports no other folder of Hardy."""
