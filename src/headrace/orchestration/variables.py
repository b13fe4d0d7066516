"""Which environment variables the workers of users' code get: what programs need, and what the configuration names.

Keys and tokens in the controller's environment are not for every library, tool or model-written program that a
worker runs. Engines and the trainer run no users' code, and keep the whole environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

USUAL = (
    # Where things are, and how to speak.
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "PWD",
        "LANG",
        "LANGUAGE",
        "LC_*",
        "TZ",
        "TMPDIR",
        "XDG_*",
    ),
    # Python and its environments.
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    # Devices, threads, compilers.
    *("CUDA_*", "NVIDIA_*", "ROCR_*", "HIP_*", "TRITON_*", "TORCHINDUCTOR_*", "PYTORCH_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "KMP_*", "GOMP_*", "TOKENIZERS_PARALLELISM", "CC", "CXX"),
    # Certificates and caches; tokens are apart from both.
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "NLTK_DATA"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Names, or patterns, of what is passed always."""


def passed(variables: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """Those of `variables` that are usual, or that a name or pattern in `named` asks for."""
    patterns = (*USUAL, *named)
    return {
        name: value for name, value in variables.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
