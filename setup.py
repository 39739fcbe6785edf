"""The heads of checkpoints/ go into the wheel, as jaxspec/checkpoints/; the rest is in
pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HEADS = Path("checkpoints")
FILES = ("README.md", "config.json", "model.safetensors")


class BuildWithHeads(build_py):
    """build_py, and the heads beside the modules. A development install reads checkpoints/."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, built in self._heads().items():
                self.mkpath(str(Path(built).parent))
                self.copy_file(source, built)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._heads().values()]

    def _heads(self) -> dict[str, str]:
        """Return built file by source file."""
        to = Path(self.build_lib, "jaxspec")
        return {
            str(path): str(to / path)
            for folder in sorted(HEADS.iterdir())
            for path in (folder / name for name in FILES)
            if path.is_file()
        }


setup(cmdclass={"build_py": BuildWithHeads})
