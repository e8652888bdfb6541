"""The cases in cases.jsonl: responses to judge, for every clone; real data is larger but optional.

Fields as for `exgrpo verify --file`, and 'about', which says what a case tests.
"""

import json
import pathlib

PATH = pathlib.Path(__file__).with_name('cases.jsonl')


def read():
  return [json.loads(line) for line in PATH.read_text(encoding='utf-8').splitlines()]
