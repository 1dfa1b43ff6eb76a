"""Configuration: one dataclass per concern, rules across them in checks.py."""
