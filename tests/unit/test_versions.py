"""The supported range of Megatron-Core."""

from importlib import metadata

import pytest

from megatron_fbt import versions
from megatron_fbt.errors import ConfigError


@pytest.mark.parametrize("version", ["0.16.1", "0.17", "0.19.2", "0.19.99"])
def test_supported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert versions.check_megatron_core_version() == version


@pytest.mark.parametrize("version", ["0.16", "0.16.0", "0.15.9", "0.20", "0.20.0rc1", "1.0"])
def test_not_supported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"{version} .*0\.16\.1 <= version < 0\.20.*Python 3.*pip install"):
        versions.check_megatron_core_version()


def test_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match="not installed.*pip install megatron-core=="):
        versions.check_megatron_core_version()


def test_installed_version_is_supported():
    assert versions.check_megatron_core_version() == metadata.version("megatron-core")
