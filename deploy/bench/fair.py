"""Whether llama.cpp is built as well as this machine allows."""
import pathlib
import sys


def require_amx(system):
    """Ends the program where the machine has AMX and llama.cpp's `system` line says that it was built without."""
    if "amx_int8" in pathlib.Path("/proc/cpuinfo").read_text() and "AMX_INT8 = 1" not in system:
        sys.exit("This llama.cpp has no AMX kernels and the machine has AMX: that is no fair comparison. "
                 "deploy/bench/peers.sh builds it with them.")
