"""What hatchling calls to build the wheel. In a clone, the scripts and model.py stand in the root,
where people edit them. In the wheel all stands in the package plaingpt, so that it meets no
model.py of somebody else, and what was imported from the root is imported from there."""

import re
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ('*.py', 'README.md', 'config/**/*.py', 'references/*.csv', 'plaingpt/**/*.py',
         'plaingpt/**/*.html')


class BuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == 'editable':  # imports and runs the clone's files
            return
        root = Path(self.root)
        self.folder = tempfile.TemporaryDirectory()
        for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
            within = path.relative_to(root)
            text = path.read_text(encoding='utf-8')
            made = Path(self.folder.name, within.relative_to(
                'plaingpt' if within.parts[0] == 'plaingpt' else '.'))
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(for_wheel(text), encoding='utf-8')
        build_data['force_include'][self.folder.name] = 'plaingpt'

    def finalize(self, version, build_data, artifact_path):
        if version != 'editable':
            self.folder.cleanup()


def for_wheel(text):
    """A file's text with the imports and the commands that are right in the wheel."""
    text = re.sub(r'^( *from )(model|configurator|train)( import )', r'\1plaingpt.\2\3', text,
                  flags=re.M)
    text = re.sub(r'\b(torchrun (?:--\S+ )*)(\w+)\.py\b', r'\1-m plaingpt \2', text)
    return re.sub(r'\bpython (\w+)\.py\b', r'plaingpt \1', text)
