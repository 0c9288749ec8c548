"""A whole cluster is broken by script while clients ask it (tests/chaos/cluster.py): every answer is that of a quiet node, and nothing is left behind."""
from harness import *


def cluster(*options):
    run_chaos('cluster.py', *options)


@alone
def test_a_cluster_that_is_broken_by_script():
    cluster('--requests', 600, '--seed', 1, '--longest', 4, '--lanes', 'prefill,decode,edge')


@alone
def test_a_cluster_that_is_broken_by_script_long():
    """The three seeds take every cell of the recovery table together."""
    with tempfile.NamedTemporaryFile('w+') as taken:
        for seed in (1, 2, 3):
            cluster('--requests', 10000, '--seed', seed, '--cells', taken.name)
        cluster('--all-cells', taken.name)


@alone
def test_a_calm_cluster_loses_no_peer_long():
    cluster('--calm', 600)


@alone
def test_an_engine_that_hangs_long():
    cluster('--hang', 'engine')


@alone
def test_what_happens_to_redis_long():
    for way in ('kill30', 'pause', 'flush', 'failover'):
        cluster('--redis', way)
    cluster('--redis', 'failover', '--tls')
    cluster('--redis', 'failover', '--clock')


@alone
def test_every_process_is_restarted_in_turn_long():
    cluster('--rolling')


@alone
def test_a_pair_without_a_data_path_long():
    cluster('--break-pair')


@alone
def test_clients_leave_in_every_state_long():
    cluster('--aborts', 1000)


@alone
def test_decode_nodes_that_are_too_small_long():
    cluster('--full')
