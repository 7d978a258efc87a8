"""The sources of drafts, one module each; registry.py finds them by name."""
