"""Values that hooks pass: a bucket of gradients, a policy of dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class PrecisionPolicy:
    """Which dtype where. A strategy with native mixed precision absorbs this instead of calling the precision's hooks.

    ``None`` means "leave as it is".
    """

    #: Of parameters.
    param_dtype: torch.dtype | None = None
    #: Of forward and backward.
    compute_dtype: torch.dtype | None = None
    #: Of gradients while they are averaged.
    reduce_dtype: torch.dtype | None = None
    #: Of the module's buffers.
    buffer_dtype: torch.dtype | None = None
    #: Whether the loss is scaled so that small gradients do not vanish.
    loss_scaling: bool = False


@frozen(eq=False, kw_only=True)
class Bucket:
    """A flat buffer of gradients to average over the ranks; the argument of a comm hook.

    For a hook that is stacked under another one, `buffer` is what the hook above sends, and `parameters` is empty.
    Exactly one bucket per backward must set `is_last`; without it training hangs.
    """

    #: 1-D, any floating dtype; a hook may overwrite it.
    buffer: torch.Tensor
    #: The same index is the same bucket on every rank. DDP lays its buckets out once more after the first step of a
    #: process: an index may then have other parameters, or the same in another order.
    index: int = 0
    #: The last bucket of this backward.
    is_last: bool = True
    #: The parameters whose gradients lie in `buffer`, in that order.
    parameters: tuple[torch.Tensor, ...] = ()
    #: Views into `buffer`, one for each parameter.
    gradients: tuple[torch.Tensor, ...] = ()
