#!/usr/bin/env python3
"""bench_skewed_load.py - requests that choose the experts of few ranks, before and after experts are placed by their load.

usage: bench_skewed_load.py [--size 4] [--streams 16] [--steps 300] [--redundant 4] [--skew 0.2] [--after 20]

A model of dummy weights whose routers prefer the first experts, which contiguous placement puts on one rank. Ranks are launched with
--enable-eplb, placed anew after --steps steps, and asked by --streams clients without a pause; every answer, with its log-probabilities, must be that of one process
which has all experts. The program's log says the imbalance (rows of the busiest rank by the mean) that it found, its metric what it
found last. Limits: from above 2 to below 1.2; 0 failed, 0 different. Throughput: prompt and answer tokens of the requests that end before
the first change, and from a second after the last. Environment: BATON_BIN, BATON_TEST_DATA."""
import argparse, array, json, os, random, re, shutil, sys, tempfile, threading, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, '..', d) for d in ('e2e', 'fixtures')]
from harness import BIN, DATA, Node, Process, answer_of, closing, free_ports, metrics, request, wait_ready, wait_until
from safetensors_file import Tensor, write_file

HIDDEN, LAYERS, EXPERTS, USED, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 512, 4, 32, 4, 512, 8, 2, 64, 512
PROMPT, ANSWER, BODIES = 96, 8, 48
HIGH_BYTES = bytes((0xbc, 0x3c, 0xbd, 0x3d)[i & 3] for i in range(256))  # of bf16 numbers between 1/128 and 1/8 of either sign
GOLDEN = f'{DATA}/goldens/ernie_moe/model'
LIMIT_BEFORE, LIMIT_AFTER = 2, 1.2


def bf16(*shape, seed=random.Random(7)):
    n = 1
    for d in shape:
        n *= d
    data = bytearray(seed.randbytes(2 * n))
    data[1::2] = data[1::2].translate(HIGH_BYTES)
    return Tensor('BF16', shape, lambda: data)


def ones(n):
    return Tensor('BF16', (n,), lambda: b'\x80\x3f' * n)


def bias(skew):
    """Added to the probabilities for the choice alone: most to the first expert's, nothing to the last one's."""
    return Tensor('F32', (1, EXPERTS), lambda: array.array('f', [skew * (1 - e / EXPERTS) ** 2 for e in range(EXPERTS)]).tobytes())


def write_model(to, skew):
    with open(f'{GOLDEN}/config.json') as f:
        config = json.load(f)
    config.update(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=INNER,
                  moe_num_experts=EXPERTS, moe_k=USED, moe_intermediate_size=INNER, moe_num_shared_experts=0, moe_layer_start_index=0, moe_layer_end_index=LAYERS - 1,
                  moe_capacity=[EXPERTS] * 3, num_nextn_predict_layers=0, vocab_size=VOCAB)
    t = {'model.embed_tokens.weight': bf16(VOCAB, HIDDEN), 'model.norm.weight': ones(HIDDEN)}
    for i in range(LAYERS):
        p = f'model.layers.{i}.'
        t.update({p + 'input_layernorm.weight': ones(HIDDEN), p + 'post_attention_layernorm.weight': ones(HIDDEN),
                  p + 'self_attn.q_proj.weight': bf16(HEADS * HEAD_DIM, HIDDEN), p + 'self_attn.k_proj.weight': bf16(KV_HEADS * HEAD_DIM, HIDDEN),
                  p + 'self_attn.v_proj.weight': bf16(KV_HEADS * HEAD_DIM, HIDDEN), p + 'self_attn.o_proj.weight': bf16(HIDDEN, HEADS * HEAD_DIM),
                  p + 'mlp.gate.weight': bf16(EXPERTS, HIDDEN), p + 'mlp.moe_statics.e_score_correction_bias': bias(skew)})
        for e in range(EXPERTS):
            q = f'{p}mlp.experts.{e}.'
            t.update({q + 'gate_proj.weight': bf16(INNER, HIDDEN), q + 'up_proj.weight': bf16(INNER, HIDDEN), q + 'down_proj.weight': bf16(HIDDEN, INNER)})
    write_file(f'{to}/model.safetensors', t)
    with open(f'{to}/config.json', 'w') as f:
        json.dump(config, f)
    for name in 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json':
        shutil.copy(f'{GOLDEN}/{name}', to)


def bodies():
    r = random.Random(3)
    return [dict(model='m', prompt=[r.randrange(4, VOCAB) for _ in range(PROMPT)], max_tokens=ANSWER, temperature=0.8, seed=i, logprobs=5, ignore_eos=True,
                 return_token_ids=True, return_tokens_as_token_ids=True) for i in range(BODIES)]


SERVE = ['--max-model-len', '512', '--max-num-seqs', '16', '--max-num-batched-tokens', '256', '--num-gpu-blocks-override', '96', '--no-enable-prefix-caching']


def answers_alone(model, asked):
    node = Node(model, args=SERVE)
    with closing(node):
        wait_ready(node)
        return [answer_of(request(node.port, 'POST', '/v1/completions', b)[2]) for b in asked]


class Load:
    """Clients that ask one request after another until stopped."""

    def __init__(self, ports, asked, want, n):
        self.ports, self.asked, self.want, self.ends, self.failed, self.different, self.going = ports, asked, want, [], [], 0, True
        self.threads = [threading.Thread(target=self.run, args=(i, n)) for i in range(n)]

    def run(self, i, step):
        while self.going:
            try:
                status, _, body = request(self.ports[i % len(self.ports)], 'POST', '/v1/completions', self.asked[i % BODIES])
                if status != 200:
                    self.failed.append(body)
                elif answer_of(body) != self.want[i % BODIES]:
                    self.different += 1
            except Exception as e:  # it counts as failed
                self.failed.append(e)
            self.ends.append(time.monotonic())
            i += step

    def rate(self, begin, end):
        return sum(begin <= t < end for t in self.ends) * (PROMPT + ANSWER) / (end - begin)

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *_):
        self.going = False
        for t in self.threads:
            t.join()


def epoch(port):
    return request(port, 'GET', '/cluster')[2]['group']['epoch']


def measure(model, a, asked, want):
    ports, meet = free_ports(a.size), free_ports(1)[0]
    config = json.dumps({'step_interval': a.steps, 'num_redundant_experts': a.redundant, 'log_balancedness': True})
    l = Process([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--num-servers', str(a.size), '--ports', ','.join(map(str, ports)), '--data-parallel-size', str(a.size),
                 '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(meet), '--enable-eplb', '--eplb-config', config, *SERVE], name='launch')
    with closing(l):
        wait_until('ready', lambda: f'ready: all {a.size} nodes' in l.output(), 120)
        first = epoch(ports[0])
        with Load(ports, asked, want, a.streams) as load:
            begin = time.monotonic()
            wait_until('experts were placed anew', lambda: epoch(ports[0]) > first, 300)
            changed = time.monotonic()
            time.sleep(1)
            again = time.monotonic()
            wait_until('they were counted again', lambda: metrics(ports[0])['baton_expert_imbalance'] < LIMIT_BEFORE, 300)
            time.sleep(a.after)
            end, last = time.monotonic(), metrics(ports[0])['baton_expert_imbalance']
        found = [(float(x), float(y)) for x, y in re.findall(r'experts are placed anew.*imbalance=(\S+) becomes=(\S+)', l.output())]
        lost = [metrics(p)['baton_group_lost_total{of="experts"}'] for p in ports]
        return dict(found=found, last=last, before=load.rate(begin + 1, changed), seconds_before=changed - begin - 1, after=load.rate(again, end), seconds_after=end - again,
                    requests=len(load.ends), failed=len(load.failed), different=load.different, lost=sum(lost), why=load.failed[:1])


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split('usage: ')[1])
    for name, type, default in ('size', int, 4), ('streams', int, 16), ('after', float, 20), ('skew', float, 0.2), ('steps', int, 300), ('redundant', int, 4):
        parser.add_argument(f'--{name}', type=type, default=default)
    a = parser.parse_args()
    folder = tempfile.mkdtemp(prefix='bench_skewed_')
    try:
        write_model(folder, a.skew)
        asked = bodies()
        r = measure(folder, a, asked, answers_alone(folder, asked))
    finally:
        shutil.rmtree(folder)
    print(f'{a.size} ranks, {EXPERTS} experts and {a.redundant} copies: imbalance {r["found"][0][0]:.2f} (limit: above {LIMIT_BEFORE}), at the end {r["last"]:.2f} (limit: below {LIMIT_AFTER}); '
          f'placed anew {len(r["found"])} times: {r["found"]}')
    print(f'tokens per second: {r["before"]:.0f} before (over {r["seconds_before"]:.0f} s), {r["after"]:.0f} after (over {r["seconds_after"]:.0f} s), ratio {r["after"] / r["before"]:.2f}')
    print(f'{r["requests"]} requests, {r["failed"]} failed, {r["different"]} different, {r["lost"]:.0f} groups lost {r["why"]}')


main()
