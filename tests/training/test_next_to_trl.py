"""`--config=trl_grpo` with several epochs, compared with TRL with num_iterations.

TRL generates the responses. The run receives them with their log-probabilities.
"""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import exgrpo_jax as ex
from exgrpo_jax.datatypes import Response
from exgrpo_jax.huggingface import weights
from exgrpo_jax.rollout.sampler import ignore
from exgrpo_jax.training import loop
from tests.helpers import losses, shaped
from tests.helpers.paths import CHECKPOINTS

pytestmark = pytest.mark.full
MODEL, QUESTION = CHECKPOINTS / 'qwen2_tied', '48+9+3+7'
STEPS, ITERATIONS, ROWS, LIMIT, RATE = 2, 2, 8, 40, 0.01


@dataclasses.dataclass
class Theirs:
  """TRL's inputs and loss for each update, and the folder of its last model."""

  inputs: list
  losses: list
  clipped: list
  norms: list
  folder: pathlib.Path


def train_with_trl(prompt, folder):
  """Train with GRPOTrainer's defaults, except for sizes and learning rate, on a single prompt."""
  torch, datasets, transformers = map(pytest.importorskip, ('torch', 'datasets', 'transformers'))
  trl = pytest.importorskip('trl', '1.16')
  found = Theirs([], [], [], [], folder / 'trained')

  class Trainer(trl.GRPOTrainer):
    def _compute_loss(self, model, inputs):
      loss = super()._compute_loss(model, inputs)
      arrays = {k: x.numpy() for k, x in inputs.items() if isinstance(x, torch.Tensor)}
      found.inputs.append(arrays)
      found.losses.append(loss.item())
      return loss

  args = trl.GRPOConfig(
    output_dir=str(folder / 'out'),
    num_iterations=ITERATIONS,
    max_steps=STEPS * ITERATIONS,
    max_completion_length=LIMIT,
    learning_rate=RATE,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy='no',
    report_to='none',
    disable_tqdm=True,
  )
  trainer = Trainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
    reward_funcs=lambda completion_ids, **_: [shaped.of_first_token(ids) for ids in completion_ids],
    args=args,
    train_dataset=datasets.Dataset.from_list([{'prompt': prompt}] * 4),
    processing_class=transformers.AutoTokenizer.from_pretrained(MODEL),
  )
  trainer.train()
  logged = [record for record in trainer.state.log_history if 'grad_norm' in record]
  found.norms = [record['grad_norm'] for record in logged]
  found.clipped = [record['clip_ratio/region_mean'] for record in logged]
  trainer.model.save_pretrained(found.folder)
  return found


class Forced:
  """A sampler that returns TRL's responses, step by step."""

  def __init__(self, theirs):
    self.steps = iter(theirs.inputs[::ITERATIONS])

  def generate(self, params, requests, on_finish=ignore):
    del params
    step, responses = next(self.steps), []
    own_BT = step['completion_mask'] > 0
    for index, (own_T, request) in enumerate(zip(own_BT, requests, strict=True)):
      np.testing.assert_array_equal(request.prompt, step['prompt_ids'][index])
      tokens = step['completion_ids'][index][own_T].astype(np.int32)
      logp = step['old_per_token_logps'][index][own_T]
      is_cut = len(tokens) == LIMIT
      responses.append(Response(tokens, logp, np.zeros_like(logp), truncated=is_cut))
      on_finish(index, responses[-1])
    return responses, {}


def distance(tree, other):
  return losses.norm(jax.tree.map(lambda x, y: np.asarray(x) - y, tree, other))


def test_two_epochs_give_the_losses_of_trl_with_two_iterations(tmp_path, monkeypatch):
  """The losses, gradients and clip fractions of each update match, and the last parameters."""
  (tmp_path / 'train.jsonl').write_text(json.dumps({'question': QUESTION, 'answer': '67'}))
  config = ex.load_config(
    'trl_grpo',
    {
      'num_steps': STEPS,
      'model.path': str(MODEL),
      'model.dtype': 'float32',
      'model.extension.max_position_embeddings': 0,
      'data.train': str(tmp_path / 'train.jsonl'),
      'rollout.max_prompt': 32,
      'rollout.max_response': LIMIT,
      'optimizer.learning_rate': RATE,
      'optimizer.epochs': ITERATIONS,
      'grading.rewards': ('tests.helpers.shaped:of_first_token',),
      'grading.workers': 1,
      'logprob_check.every': 1,
      'logprob_check.max': 1e-3,
      'compilation_cache': '',
    },
  )
  learned, learn = [], loop.learn

  def noting(run, state, experience):
    state, sums = learn(run, state, experience)
    learned.extend((one, experience.batch.advantage_B) for one in jax.device_get(sums))
    return state, sums

  monkeypatch.setattr(loop, 'learn', noting)
  with ex.open_run(config, str(tmp_path / 'run')) as run:
    rollout = run.run.rollout
    theirs = train_with_trl(rollout.tokenizer.decode(rollout.data.prompts[0]), tmp_path)
    run.run.rollout = dataclasses.replace(rollout, sampler=Forced(theirs))
    gaps = [step.metrics['rollout_mismatch/logprob_max'] for step in run.steps()]
    shape, mesh = run.run.experiment.model, run.run.experiment.meshes.training
    ours = jax.device_get(run.snapshot.state.params)
  assert gaps[0] < 1e-5
  columns = theirs.inputs, theirs.losses, theirs.norms, theirs.clipped, learned
  for inputs, loss, norm, clipped, (sums, advantage_B) in zip(*columns, strict=True):
    np.testing.assert_allclose(advantage_B, inputs['advantages'], rtol=1e-5)
    assert sums['loss'] == pytest.approx(loss, abs=1e-5)
    assert sums['gradient_norm'] == pytest.approx(norm, rel=1e-4)
    assert sums['clipped'] / sums['tokens'] == pytest.approx(clipped, abs=1e-6)
  assert theirs.clipped[0] == 0 and theirs.clipped[1] > 0.2
  before, after = (weights.load(str(folder), shape, mesh) for folder in (MODEL, theirs.folder))
  assert distance(ours, after) < 1e-3 * distance(before, after)
