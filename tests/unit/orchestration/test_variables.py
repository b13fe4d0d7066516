from __future__ import annotations

from headrace.orchestration.variables import passed

VARIABLES = {
    "PATH": "/bin",
    "HOME": "/root",
    "LC_ALL": "C",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/cache",
    "HF_TOKEN": "secret",
    "HUGGING_FACE_HUB_TOKEN": "secret",
    "OPENAI_API_KEY": "secret",
    "OPENAI_BASE_URL": "http://here",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "WANDB_API_KEY": "secret",
    "SSH_AUTH_SOCK": "/agent",
    "HTTPS_PROXY": "http://name:password@proxy",
    "path": "not PATH",
}
USUAL = {"PATH", "HOME", "LC_ALL", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "HF_HOME"}


def test_keys_and_tokens_are_withheld_unless_they_are_named() -> None:
    assert set(passed(VARIABLES, ())) == USUAL
    assert set(passed(VARIABLES, ("OPENAI_*",))) == USUAL | {"OPENAI_API_KEY", "OPENAI_BASE_URL"}
    assert set(passed(VARIABLES, ("HF_TOKEN",))) == USUAL | {"HF_TOKEN"}
    assert passed(VARIABLES, ("*",)) == VARIABLES
