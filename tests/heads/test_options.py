"""What `build` says of options that a head does not take."""

import pytest
import torch

from unembed import heads
from unembed.heads._options import check_options


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mos:k=2.0", "'mos:k=2.0': `k` of MixtureOfSoftmaxes takes an integer, got 2.0."),
        ("mos:k=True", "'mos:k=True': `k` of MixtureOfSoftmaxes takes an integer, got True."),
        ("mos:k=", "'mos:k=': `k` of MixtureOfSoftmaxes takes an integer, got ''."),
        ("mos:shared=3", "'mos:shared=3': `shared` of MixtureOfSoftmaxes takes True or False, got 3."),
        ("linear:softcap=hot", "'linear:softcap=hot': `softcap` of Linear takes a number or None, got 'hot'."),
        (
            "doc:k=[1,2.5]",
            "'doc:k=[1,2.5]': `k` of DirectOutputConnection takes an integer or a list of integers, got [1, 2.5].",
        ),
        (
            "mos:activaton=tanh",
            "'mos:activaton=tanh': MixtureOfSoftmaxes has no option 'activaton'; did you mean 'activation'? "
            "There are activation, bias, k, shared, sigsoftmax.",
        ),
        ("linear:dtype=2", "'linear:dtype=2': Linear has no option 'dtype'; there are bias, scale, softcap."),
        ("mos:activation=relu", "`activation` must be tanh or identity, got 'relu'."),
    ],
)
def test_one_line_with_the_option_and_what_it_takes(spec, said):
    with pytest.raises(ValueError) as told:  # noqa: PT011 - the whole message is compared
        heads.build(spec, 8, 20)
    assert str(told.value) == said


def test_the_nearest_head_is_named():
    with pytest.raises(ValueError, match=r"There is no head 'mixtap'; did you mean 'mixtape'\? There are adaptive, "):
        heads.build("mixtap", 8, 20)
    with pytest.raises(ValueError, match="There is no head 'zzz'; there are adaptive, "):
        heads.build("zzz", 8, 20)


def test_what_fits_is_built():
    assert heads.build("linear:softcap=3,scale=2", 8, 20).softcap == 3
    assert heads.build("doc:k=[1,0],layers=2", 8, 20).counts == [1, 0]
    assert heads.build("adaptive:cutoffs=(3,9),div_value=2", 8, 20).cutoffs == (3, 9)
    assert heads.build("low_rank:rank=None", 8, 20).rank == 2


def test_types_that_only_a_checker_knows_are_left_to_the_head():
    class Other(heads.Linear):
        def __init__(self, in_features, out_features, *, kind: "Unheard" = None, device=None, dtype=None):  # noqa: F821
            super().__init__(in_features, out_features, device=device, dtype=dtype)

    check_options(Other, {"kind": torch.ones(1)})
    with pytest.raises(ValueError, match="Other has no option 'knd'; did you mean 'kind'"):
        check_options(Other, {"knd": 1})
