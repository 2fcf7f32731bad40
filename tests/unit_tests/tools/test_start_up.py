import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize("name", ["get_smollm2", "calibrate_draft_vocab", "plot_run", "prepare_conversations"])
def test_help_answers_without_importing_torch(name):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['{name}.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(TOOLS / f'{name}.py')!r}, run_name='__main__')\n"
        "except SystemExit as leave:\n"
        "    assert leave.code == 0, leave.code\n"
        "heavy = {'torch', 'transformers', 'megatron.core', 'matplotlib', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
