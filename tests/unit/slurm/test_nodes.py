"""Node lists, the address of the first node, the port of a job."""

import pytest

from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm import nodes
from megatron_fbt.slurm.nodes import expand_node_list, job_port, main, master_address, node_address

LISTS = {
    "n1": ["n1"],
    "gpu[003-005,010]": ["gpu003", "gpu004", "gpu005", "gpu010"],
    "a-b-[1-2]": ["a-b-1", "a-b-2"],
    "x1,y2": ["x1", "y2"],
    "rack[1-2]n[01-02]": ["rack1n01", "rack1n02", "rack2n01", "rack2n02"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[08-10]s,login": ["n08s", "n09s", "n10s", "login"],
    "a[1,3],b[2-3]-ib": ["a1", "a3", "b2-ib", "b3-ib"],
    "a, n[1-2]": ["a", "n1", "n2"],
    "n[099-101]": ["n099", "n100", "n101"],
}


@pytest.mark.parametrize("text", LISTS)
def test_node_lists(text):
    assert expand_node_list(text) == LISTS[text]


@pytest.mark.parametrize(
    "text", ["", "n[", "n[1-2", "n1]", "n[2-1]", "n[a-b]", "n[]", "a,,b", "n[1]]", "a b", "n[٣-٥]"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(ConfigError, match="node list"):
        expand_node_list(text)


@pytest.mark.parametrize("text", ["n[0-999999999]", "n[1-9999]m[1-9999]", "n[1-" + "9" * 5000 + "]"])
def test_lists_that_no_cluster_has_are_refused_at_once(text):
    with pytest.raises(ConfigError, match="node list"):
        expand_node_list(text)


@pytest.fixture
def no_scontrol(monkeypatch):
    """As inside of a container."""
    monkeypatch.setattr(nodes.shutil, "which", lambda name: None)


@pytest.mark.parametrize("text", LISTS)
def test_without_scontrol_the_first_node_is_the_address(no_scontrol, monkeypatch, text):
    monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda *place: [])
    assert master_address({"SLURM_JOB_NODELIST": text}) == LISTS[text][0]


def test_an_address_that_is_set_is_kept(no_scontrol):
    assert master_address({"MASTER_ADDR": "10.0.0.7", "SLURM_JOB_NODELIST": "n[1-2]"}) == "10.0.0.7"


def test_without_a_job_there_is_no_address(no_scontrol):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        master_address({})


def fake_scontrol(tmp_path, monkeypatch, text):
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def unknown(*place):
        raise OSError("no such name")

    monkeypatch.setattr(nodes.socket, "getaddrinfo", unknown)


def test_a_name_that_does_not_resolve_becomes_slurms_address(tmp_path, monkeypatch):
    fake_scontrol(tmp_path, monkeypatch, 'echo "NodeName=$4 Arch=x NodeAddr=10.1.2.3 NodeHostName=$4"')
    assert node_address("n1") == "10.1.2.3"


def test_a_broken_scontrol_does_no_harm(tmp_path, monkeypatch):
    fake_scontrol(tmp_path, monkeypatch, "exit 1")
    assert master_address({"SLURM_JOB_NODELIST": "n[07-09]"}) == "n07"


def test_ports_are_legal_and_differ_between_jobs():
    ports = [job_port({"SLURM_JOB_ID": str(job)}, second) for job in range(5000, 16000) for second in (False, True)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 10000 and max(ports) < 32768
    assert job_port({"SLURM_JOB_ID": "5000"}) == 20000


def test_without_a_job_id_there_is_no_port():
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        job_port({})


def test_the_command_prints_one_of_them(monkeypatch, capsys, no_scontrol):
    monkeypatch.setattr(nodes, "environ", {"SLURM_JOB_ID": "7", "MASTER_ADDR": "here"})
    assert (main(["address"]), main(["port"]), main(["both"])) == (0, 0, 2)
    printed = capsys.readouterr()
    assert printed.out.split() == ["here", "10014"] and "address, port" in printed.err
