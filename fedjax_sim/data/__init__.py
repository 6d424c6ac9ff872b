"""Data: sources -> partition -> protocols -> Federation."""
