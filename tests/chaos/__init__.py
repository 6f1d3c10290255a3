"""Faults at random, from a seed, against a whole fleet: nothing may be lost, doubled or left standing."""
