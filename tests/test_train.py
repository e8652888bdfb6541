import numpy as np
def test_x(recorded):
  for n, s in recorded.steps.items():
    print(n, 'epoch', s.plan.epoch, 'rep', sum(s.plan.is_replay_Q), 'elig', len(s.buffer.entries), 'retired', len(s.buffer.retired_epoch), 'old', [n - r.step for r in s.replays if r], 'pass', np.mean([v.correct for g in s.verdicts for v in g]), [len(e.trajectories) for e in s.after.entries.values()], [len(r.tokens) for g in s.responses for r in g][:6],
     'fresh retired', [q.row for q, rp in zip(s.plan.questions, s.plan.is_replay_Q) if q.row in s.buffer.retired_epoch])
  print(recorded.steps[3].batch)
  from exgrpo_jax import metrics
  print(metrics.read(recorded.workdir)[-1])
