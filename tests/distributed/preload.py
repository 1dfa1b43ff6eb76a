"""Imported once by the server that test processes fork from, so that each of them starts in milliseconds."""

import torch  # noqa: F401

import megatron_fbt.training.session  # noqa: F401
