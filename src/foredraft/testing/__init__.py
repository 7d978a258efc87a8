"""Fakes and exact enumeration, for tests of drafters and of the engine itself."""
