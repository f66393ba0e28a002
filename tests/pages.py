"""Read the code blocks of a page."""

import re


def command_blocks(page: str) -> list[list[str]]:
    """Return the commands of each `bash` block; a command that continues on the next line is one."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    return [
        [line.strip() for line in re.sub(r" \\\n\s*", " ", block).splitlines() if not line.lstrip().startswith("#")]
        for block in blocks
    ]


def python_blocks(page: str) -> list[str]:
    """Return the text of each `python` block."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[str]:
    """Return the commands of all `bash` blocks."""
    return [command for block in command_blocks(page) for command in block]
