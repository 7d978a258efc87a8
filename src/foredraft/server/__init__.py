"""Serving; the only asynchronous code."""
