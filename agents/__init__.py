"""Agent adapters: each maps one vendor to the protocol of `agents.base`."""
