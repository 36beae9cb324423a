"""Integrations with other libraries' trainers; each module imports one framework."""
