"""The choice of one token."""

from collections import Counter

import pytest
import torch

from omnimodel.runtime.generation.sampling import Sampling, chosen

torch.set_num_threads(1)
LOGITS = torch.tensor([1.0, 2.0, 3.0, 0.0])


def picks(count=4000, scores=LOGITS, **sampling):
    found = Counter(int(chosen(scores.clone(), Sampling(seed=seed, **sampling), []).argmax()) for seed in range(count))
    return [found[token] / count for token in range(len(scores))]


def test_draws_follow_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1).tolist()
        assert picks(temperature=temperature) == pytest.approx(expected, abs=0.03)


def test_top_k_and_top_p_leave_the_most_likely_only():
    assert picks(500, temperature=1.0, top_k=1)[2] == 1
    assert picks(500, temperature=1.0, top_p=0.0)[2] == 1
    two = picks(2000, temperature=1.0, top_k=2)
    assert two[0] == two[3] == 0
    # 0.64 of the probability is on the best token and 0.24 on the next: 0.7 needs both.
    assert picks(2000, temperature=1.0, top_p=0.7)[0] == 0
    assert picks(2000, temperature=1.0, top_p=0.7)[1] > 0.2


def test_penalties_and_biases_change_the_greedy_choice():
    def greedy(generated=(), **sampling):
        return int(chosen(LOGITS.clone(), Sampling(temperature=0, **sampling), list(generated)).argmax())

    assert greedy() == 2
    assert greedy([2], presence_penalty=1.5) == 1
    assert greedy([2], frequency_penalty=0.9) == 2
    assert greedy([2, 2], frequency_penalty=0.9) == 1
    assert greedy(bias={3: 10.0}) == 3


def test_the_noise_depends_on_seed_and_position_only():
    one = chosen(LOGITS.clone(), Sampling(seed=5), [1, 2])
    assert torch.equal(one, chosen(LOGITS.clone(), Sampling(seed=5), [3, 3]))
    assert not torch.equal(one, chosen(LOGITS.clone(), Sampling(seed=5), [3]))
    assert not torch.equal(one, chosen(LOGITS.clone(), Sampling(seed=6), [1, 2]))


def test_two_requests_without_a_seed_differ():
    assert Sampling().seed != Sampling().seed
