"""What `train METHOD --over` says at its end."""

from __future__ import annotations

from fedjax_sim.cli.main import main
from fedjax_sim.runner.across import evolve


def test_the_command_that_uses_the_policy_has_its_shape(monkeypatch, tmp_path, capsys):
    found = {"parts": "agent.parameters"}
    monkeypatch.setattr(evolve, "train_over", lambda *given, **more: found)
    argv = ["train", "fedpolicy", "--over", "data:digits", "--out", str(tmp_path / "x")]
    assert main([*argv, "--set", "fedpolicy.agent.bias=true", "--model", "mlp"]) == 0
    said = capsys.readouterr().out
    assert "--set fedpolicy.agent=evolved --set fedpolicy.agent.bias=true --start-from" in said
