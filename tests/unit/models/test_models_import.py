from __future__ import annotations

import subprocess
import sys

import pytest

import headrace.models


@pytest.mark.parametrize(
    "module",
    ["headrace.models", "headrace.models.config", "headrace.models.folder", "headrace.models.shapes"],
)
def test_importing_it_imports_no_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checking_a_folder_through_the_package_imports_no_torch(tmp_path):
    code = (
        "import sys; from headrace.models import check_folder\n"
        f"try: check_folder({str(tmp_path)!r})\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ModelFolderError False"


def test_every_public_name_is_found_and_no_other():
    assert sorted(headrace.models.__all__) == sorted(headrace.models._HOME)
    assert [getattr(headrace.models, name).__name__ for name in headrace.models.__all__] == headrace.models.__all__
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        _ = headrace.models.Transformer
