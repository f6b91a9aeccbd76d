"""Where cargo puts what it builds; ../target_dir.sh is the same for shells."""
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
# An absolute path stays what it is, a relative one is from the root.
TARGET_DIR = ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target")
