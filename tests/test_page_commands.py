"""`page_commands` finds every command on a page, in any notation."""

import shlex

import pytest

from tests.page_commands import PAGES, commands_in, commands_of

SCRIPTS = {  # a shell script, and the words after each `jaxformer` in it
    "jaxformer train my.txt": ["train my.txt"],
    "$ jaxformer verify runs/x\nlayer 1: the model's jaxformer train": ["verify runs/x"],
    "python -m jaxformer train --steps 3": ["train --steps 3"],
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && jaxformer train": [
        "train"
    ],
    "cd x; jaxformer train; jaxformer verify runs/x": ["train", "verify runs/x"],
    "jaxformer train || jaxformer train --resume": ["train", "train --resume"],
    "jaxformer train my.txt \\\n    --steps 3 \\\n    --out x  # the run's folder": [
        "train my.txt --steps 3 --out x"
    ],
    "$ jaxformer train my.txt \\\n>   --steps 3\nstep 3": ["train my.txt --steps 3"],
    "CUDA_VISIBLE_DEVICES=0 nice -n 5 jaxformer bench": ["bench"],
    "srun --ntasks 2 jaxformer train --coordinator auto": ["train --coordinator auto"],
    "(cd runs && jaxformer verify x) &": ["verify x"],
    "for n in 1 2; do jaxformer train --seed $n; done": ["train --seed $n"],
    ".venv/bin/jaxformer trian": ["trian"],
    "ssh host 'cd x && jaxformer train'": ["train"],
    "jaxformer generate x --prompt 'a; b && c # d' > out.txt 2>&1": [
        "generate x --prompt 'a; b && c # d'"
    ],
    "cat x | jaxformer translate runs/x | sort": ["translate runs/x"],
    "jaxformer translate runs/x < my.en": ["translate runs/x"],
    "pip install jaxformer; cd jaxformer; git clone host/jaxformer .": [],
    "# jaxformer train": [],
    "python -m tests.mutation jaxformer": [],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_jaxformer_commands_are_extracted_from_any_shell_notation(script):
    assert list(commands_in(script)) == [tuple(shlex.split(words)) for words in SCRIPTS[script]]


def test_jaxformer_commands_are_extracted_from_code_blocks_and_sentences():
    """Python blocks and names of verbs are not commands."""
    page = """
Use `jaxformer train`, or `jaxformer train my.txt
--steps 3`, or `python -m jaxformer bench --quick`.

- a list:
  ```bash title="x"
  jaxformer verify runs/x
  ```

~~~
jaxformer doctor
~~~

```python
jaxformer = 1
```

```text
jaxformer compare a b
```
"""
    expected = {"train my.txt --steps 3", "bench --quick", "verify runs/x", "doctor"}
    assert commands_of(page) == {tuple(words.split()) for words in expected}


def test_commands_are_found_in_the_folders_docs_experiments_and_tests():
    folders = {page.parent.name for page in PAGES}
    assert {"docs", "experiments", "tests"} < folders
