"""mode_full.py - six decode nodes with room for two contexts each, twelve entries, and requests that outgrow them: all complete."""
import random
from .cells import Watch
from .run import Traffic, conclude, fleet_of, references
from .traffic import plans, vocabulary

CONTEXT, BLOCK, ENTRIES = 512, 64, 12
ENOUGH = 2000   # requests: so many outgrow the nodes for certain


def growing(n, seed):
    """Bodies whose answers are several times as long as their prompts."""
    r, vocab = random.Random(f'growing {seed}'), vocabulary()
    return [('/v1/completions', dict(model='m', prompt=[r.randrange(4, vocab) for _ in range(r.randint(20, 120))], max_tokens=r.randint(200, CONTEXT - 130), ignore_eos=True,
                                     return_token_ids=True, **r.choice([dict(temperature=0), dict(temperature=0.8, seed=r.randrange(1 << 31))]))) for _ in range(n)]


def full(hosts, n, seed):
    asked = growing(min(n, 200), seed)
    refs = references(asked)
    size = ['--max-model-len', str(CONTEXT), '--max-num-seqs', '16', '--num-gpu-blocks-override']
    with fleet_of(hosts, None, prefills=3, decodes=6, routers=3, pace=None, size=[*size, '100'], decode_size=[*size, str(2 * CONTEXT // BLOCK)]) as fleet:
        assert len(fleet.members) == ENTRIES
        watch = Watch(fleet.members)
        t = Traffic(fleet, plans(n, len(asked), seed, leaving=0, slow=0), asked, clients=3 * ENTRIES)
        t.start()
        t.wait()
        status, _ = conclude(fleet, t, refs, watch)
        moved = watch.losses()
        back = sum(c for (_, loss, _), c in moved.items() if loss == 'handed_back')
        again = sum(int(m.metrics().get('baton_engine_preemptions_total', 0)) for m in fleet.decode)
        done = sum(h.verdict == 'complete' for h in t.histories)
        outgrew = back > 0 and again > 0 or n < ENOUGH
        print(f'full: {done} of {len(t.histories)} complete (limit: all), {back} handed back, {again} preempted and computed again on their node'
              + ('' if outgrew else '  NEITHER MAY BE 0: the nodes were not full'), flush=True)
        return status or int(done != len(t.histories) or not outgrew)
