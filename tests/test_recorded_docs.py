"""`tools.record_docs` replaces the outputs on documentation pages with new outputs of their commands."""

import pytest
from tools.record_docs import record_page, renewed

PAGE = """\
```python
# one.py
print(1)
```

```bash
train
```

```text
7.2M parameters, bf16, 2 threads
...
validation at step 500: loss 3.7552
...
A generated line.
```

```console
sansgpu train --until 07:00
```

```console
$ ask "a"
An old answer.
$ quiet
```
"""
OUTPUTS = {
    "train\n": "loading ...\n9.9M parameters, fp32, 4 threads\nstep 1\nvalidation at step 250: loss 5.0\nstep 300\n"
    "validation at step 500: loss 2.0\nsnapshot step-000500\nOther words.\n",
    'ask "a"': "A new answer.\n",
    "quiet": "",
}


def test_each_command_runs_once_and_its_output_replaces_the_old_one() -> None:
    ran, files = [], {}

    def run(command: str) -> str:
        ran.append(command)
        return OUTPUTS[command]

    page = record_page(PAGE, run, files.__setitem__)
    assert ran == list(OUTPUTS)
    assert files == {"one.py": "# one.py\nprint(1)\n"}
    new = ("9.9M parameters, fp32, 4 threads", "validation at step 500: loss 2.0", "Other words.")
    old = ("7.2M parameters, bf16, 2 threads", "validation at step 500: loss 3.7552", "A generated line.")
    expected = PAGE.replace("An old answer.", "A new answer.")
    for before, after in zip(old, new, strict=True):
        expected = expected.replace(before, after)
    assert page == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory 1 GB,\n  more 2 GB\ntime 3 s\n", "memory 7 GB,\n  new 1 GB,\n  more 2 GB\ntime 9 s\n"),
        ("...\ndone after step 4\n", "...\ndone after step 9\n"),
        ('{"event": "eval", "loss": 3.5, ...}\n', '{"event": "eval", "loss": 2.5, ...}\n'),
        ("never seen\n", "memory 7 GB,\n"),
    ],
)
def test_parts_are_found_by_their_first_and_last_line(old: str, new: str) -> None:
    output = "memory 7 GB,\n  new 1 GB,\n  more 2 GB\ntime 9 s\nstep 8\ndone after step 9\n"
    output += '{"event": "step", "loss": 9.5}\n{"event": "eval", "loss": 2.5, "seconds": 1, "more": {}}\n'
    assert renewed(old, output) == new
