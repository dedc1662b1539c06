"""Running moments of features and targets: what the measures of chapters 3 and 4 are computed from.

Rows are samples: features H (n, d), targets Y (n, K). Sums are float64 and centred as they are taken: each chunk of
rows about its own mean, then merged with what there is (Chan, Golub and LeVeque, 1983), so no digits are lost to a
large mean. Where targets are classes, features are centred on the means of their classes: at collapse, what is left
within classes is a vanishing part of the whole, and a difference of two large sums would lose it. No matrix over pairs
of samples is formed, and memory is O(d² + dK). While there are no more samples than features the rows themselves are
kept, in float64: they are smaller than the sums, and lose nothing.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from gramlin.checks import check_finite, check_floating, check_one_device

# Rows are taken to float64 a chunk at a time: 4 MiB of them, and of wide rows 512, since each chunk passes over the
# whole sum.
_CHUNK_NUMBERS = 2**19
_CHUNK_ROWS = 512

# A standard deviation below this fraction of the mean is the rounding of the mean: the column is constant.
_CONSTANT = 1e-13


def to_float64(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tensor in float64 and without gradient; on the CPU where its device (Apple's GPUs) has no float64."""
    return tensor.detach().to("cpu" if tensor.device.type == "mps" else tensor.device).double()


def target_matrix(
    targets: Float[Tensor, "n *outputs"] | Integer[Tensor, " n"], num_classes: int | None = None
) -> Float[Tensor, "n K"]:
    """Targets as a float64 matrix: real ones as they are, (n,) as a column, integer classes one-hot.

    Args:
        targets: real (n, K) or (n,), or integer classes (n,), counted from 0.
        num_classes: K for classes; by default the largest class + 1.

    Raises:
        ValueError: another shape, a negative class, or one outside ``num_classes``.
        TypeError: booleans, complex numbers, or integers of another shape than (n,).
    """
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets are a {type(targets).__name__}; pass a torch.Tensor")
    if targets.is_floating_point():
        if targets.ndim not in (1, 2) or 0 in targets.shape[1:]:
            raise ValueError(f"targets have shape {tuple(targets.shape)}; pass (n, K), (n,), or integer classes (n,)")
        return to_float64(targets if targets.ndim == 2 else targets[:, None])
    if targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(f"targets are {targets.dtype}; pass real numbers, or classes as integers (targets.long())")
    if targets.ndim != 1:
        raise TypeError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}: integers are classes, of shape (n,); pass "
            "targets.float() if they are numbers"
        )
    if targets.numel() and targets.min() < 0:
        raise ValueError(f"targets have class {int(targets.min())}; pass classes counted from 0")
    largest = int(targets.max()) if targets.numel() else -1
    if num_classes is not None and largest >= num_classes:
        raise ValueError(f"targets have class {largest} with num_classes={num_classes}; pass a larger num_classes")
    return to_float64(F.one_hot(targets.long(), largest + 1 if num_classes is None else num_classes).float())


def checked_targets(
    features: Float[Tensor, "n d"],
    targets: Float[Tensor, "n *outputs"] | Integer[Tensor, " n"],
    num_classes: int | None = None,
) -> Float[Tensor, "n K"]:
    """``target_matrix`` of a batch's targets, after a look at all that can be wrong with the batch.

    Raises:
        ValueError: features that are not (n, d), no samples, a different number of targets, NaN or infinite entries,
            several devices; as in ``target_matrix``.
        TypeError: features that are not floating-point; as in ``target_matrix``.
    """
    check_features(features)
    matrix = target_matrix(targets, num_classes)
    if len(matrix) != len(features):
        raise ValueError(
            f"features have shape {tuple(features.shape)}, targets {tuple(targets.shape)}: the first axes must agree"
        )
    check_one_device({"features": features, "targets": targets})
    check_finite("features", features)
    check_finite("targets", matrix)
    return matrix


def check_features(features: Float[Tensor, "n d"]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless features are floating-point, (n, d) and not empty."""
    check_floating("features", features, "e.g. features.float()")
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features have shape {tuple(features.shape)}; pass (n, d), e.g. features.flatten(1)")
    if len(features) == 0:
        raise ValueError(f"the batch is empty: features have shape {tuple(features.shape)}; pass at least one sample")


def centred(rows: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
    """The rows in float64 less their mean, constant columns exactly zero."""
    rows = to_float64(rows)
    mean = rows.mean(dim=0)
    rows = rows - mean
    rows *= _without_rounding(torch.linalg.vector_norm(rows, dim=0).square(), mean, len(rows)) > 0
    return rows


@dataclass
class Sums:
    """Sums about the mean of joint rows (features, real targets), p = d + K columns, in float64.

    Attributes:
        count: n.
        mean: of each column.
        products: features times all columns; only the upper triangle of the first d columns is filled.
        squares: of each target.
    """

    count: int
    mean: Float[Tensor, " p"]
    products: Float[Tensor, "d p"]
    squares: Float[Tensor, " K"]

    @classmethod
    def zeros(cls, d: int, K: int, device: torch.device) -> "Sums":
        """Of no rows."""
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in (d + K, (d, d + K), K)))

    def add_rows(self, *columns: Float[Tensor, "n _"]) -> None:
        """Add one chunk of rows, at least one, whose columns come in one or several parts, in any precision."""
        n = len(columns[0])
        rows = self.mean.new_empty(n + 1, len(self.mean))  # one more, see _absorb
        torch.cat(columns, dim=1, out=rows[:n])
        mean = rows[:n].mean(dim=0)
        rows[:n] -= mean
        self._absorb(rows, n, mean)

    def add(self, other: "Sums") -> None:
        """Add the sums of other rows, which are left as they were."""
        self.products += other.products
        self.squares += other.squares
        self._absorb(torch.empty_like(self.mean)[None], other.count, other.mean)

    @property
    def scatter(self) -> Float[Tensor, "d d"]:
        """Of the features."""
        return _mirrored(self.products[:, : len(self.products)])

    @property
    def cross(self) -> Float[Tensor, "d K"]:
        """Of features and targets."""
        return self.products[:, len(self.products) :]

    @property
    def feature_squares(self) -> Float[Tensor, " d"]:
        """Of each feature; the diagonal of ``scatter``."""
        return self.products.diagonal()

    def target_squares(self) -> Float[Tensor, " K"]:
        """Σ (y − ȳ)² of each target, with constant targets exactly zero."""
        return _without_rounding(self.squares, self.mean[len(self.products) :], self.count)

    def widened(self, K: int) -> "Sums":
        """With columns of zeros up to K targets."""
        width = len(self.products) + K
        return Sums(self.count, _widened(self.mean, width), _widened(self.products, width), _widened(self.squares, K))

    def _absorb(self, rows: Float[Tensor, "m p"], count: int, mean: Float[Tensor, " p"]) -> None:
        """Add products of rows less their mean, the last row aside: it takes what the move of the mean is worth."""
        d, total = len(self.products), self.count + count
        shift = mean - self.mean
        rows[-1] = shift * math.sqrt(self.count * count / total)
        _add_products(self.products, rows)
        self.squares += rows[:, d:].square().sum(dim=0)
        self.mean += shift * (count / total)
        self.count = total


@dataclass
class ClassSums:
    """Sums of features about the means of their classes, in float64; the moments of one-hot targets follow from them.

    Attributes:
        counts: n_c, the samples of each class.
        means: μ_c, zero for a class without samples.
        within: Σ (h − μ_c)(h − μ_c)ᵀ over all samples, each with its own class; only the upper triangle is filled.
    """

    counts: Float[Tensor, " K"]
    means: Float[Tensor, "K d"]
    within: Float[Tensor, "d d"]

    @classmethod
    def zeros(cls, d: int, K: int, device: torch.device) -> "ClassSums":
        """Of no rows."""
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in (K, (K, d), (d, d))))

    def add_rows(self, features: Float[Tensor, "n d"], one_hot: Float[Tensor, "n K"]) -> None:
        """Add one chunk of rows, at least one, with features in any precision."""
        n, K = one_hot.shape
        rows = self.means.new_empty(n + min(n, K), len(self.within))  # more than there are, see _absorb
        rows[:n] = features
        self._absorb(rows, n, *_centre_by_class(rows[:n], one_hot))

    def add(self, other: "ClassSums") -> None:
        """Add the sums of other rows, which are left as they were."""
        self.within += other.within
        self._absorb(torch.empty_like(self.means), 0, other.counts, other.means)

    @property
    def count(self) -> int:
        """All samples, n."""
        return int(self.counts.sum())

    @property
    def mean(self) -> Float[Tensor, " p"]:
        """Of each feature, then of each class."""
        fractions = self.counts / self.count
        return torch.cat([fractions @ self.means, fractions])

    @property
    def scatter(self) -> Float[Tensor, "d d"]:
        """Of the features: within and between classes."""
        shifts = self._shifts()
        return _mirrored(self.within) + (self.counts * shifts.mT) @ shifts

    @property
    def cross(self) -> Float[Tensor, "d K"]:
        """Of features and one-hot classes, n_c(μ_c − mean)."""
        return self.counts * self._shifts().mT

    @property
    def feature_squares(self) -> Float[Tensor, " d"]:
        """Of each feature; the diagonal of ``scatter``."""
        return self.within.diagonal() + self.counts @ self._shifts().square()

    def target_squares(self) -> Float[Tensor, " K"]:
        """Of each one-hot class, n_c(n − n_c)/n."""
        return self.counts * (self.count - self.counts) / self.count

    def widened(self, K: int) -> "ClassSums":
        """With classes without samples up to K."""
        new = K - len(self.counts)
        return ClassSums(_widened(self.counts, K), F.pad(self.means, (0, 0, 0, new)), self.within)

    def _shifts(self) -> Float[Tensor, "K d"]:
        """Class means less the mean; zero for a class without samples."""
        return (self.means - self.mean[: len(self.within)]) * (self.counts > 0)[:, None]

    def _absorb(
        self, rows: Float[Tensor, "m d"], n: int, counts: Float[Tensor, " K"], means: Float[Tensor, "K d"]
    ) -> None:
        """Add products of n rows less the means of their classes; the rest take what the moves of means are worth."""
        totals = self.counts + counts
        share = counts / totals.clamp_min(1)
        moves = means - self.means
        due = (self.counts * share).sqrt()[:, None] * moves
        due = due[due.any(dim=1)]
        rows[n : n + len(due)] = due
        _add_products(self.within, rows[: n + len(due)])
        self.means += share[:, None] * moves
        self.counts = totals


def _centre_by_class(
    rows: Float[Tensor, "n d"], one_hot: Float[Tensor, "n K"]
) -> tuple[Float[Tensor, " K"], Float[Tensor, "K d"]]:
    """Take the means of their classes off the rows, in place; counts and means of classes, zero without samples."""
    labels, counts = one_hot.argmax(dim=1), one_hot.sum(dim=0)
    origin = rows.mean(dim=0)
    rows -= origin  # sums of what is left are small, and so is their rounding
    totals = rows.new_zeros(len(counts), len(origin)).index_add_(0, labels, rows)
    shifts = totals / counts.clamp_min(1)[:, None]
    rows -= shifts.index_select(0, labels)
    return counts, (origin + shifts) * (counts > 0)[:, None]


def _add_products(products: Float[Tensor, "d p"], rows: Float[Tensor, "n p"]) -> None:
    """Add the products of the first d columns with all, in the upper triangle of those."""
    d = len(products)
    block = max(64, d // 16)  # a symmetric product a strip at a time: little more than half the work
    for start in range(0, d, block):
        stop = min(start + block, d)
        products[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:])


def _mirrored(upper: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The symmetric matrix with this upper triangle."""
    upper = upper.triu()
    return upper + upper.triu(1).mT


class Moments:
    """Means, scatter and cross scatter of features and targets, added up over batches.

    ``update`` adds a batch and ``merge`` the moments of other data; the result does not depend, but for rounding, on
    how the data was split. Integer targets are classes, one-hot in the sums: a class that a batch lacks counts as a
    column of zeros, and a class that no batch has shown so far adds a column when it comes.

    The first batch sets the device, which is the CPU for devices without float64 (Apple's GPUs).

    Args:
        num_classes: K for classes; by default the largest class seen + 1.

    Attributes:
        num_features: d, and 0 before the first batch.
        num_targets: K, likewise.
        are_classes: whether targets are classes; None before the first batch.

    Example:
        >>> import torch
        >>> moments = Moments()
        >>> moments.update(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]))
        >>> moments.update(torch.tensor([[8.0]]), torch.tensor([1]))
        >>> moments.count, moments.mean.item(), round(moments.scatter.item(), 4)
        (3, 4.0, 26.0)
    """

    def __init__(self, num_classes: int | None = None):
        if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
            raise ValueError(f"num_classes is {num_classes!r}; pass an integer of at least 2, or None")
        self.num_classes = num_classes
        self.num_features = self.num_targets = 0
        self.are_classes: bool | None = None
        self.rows: list[Tensor] = []  # the joint rows, while there are no more than num_features
        self.sums: Sums | ClassSums | None = None  # and their sums from then on

    # ---- adding ----

    def update(
        self, features: Float[Tensor, "n d"], targets: Float[Tensor, "n *outputs"] | Integer[Tensor, " n"]
    ) -> None:
        """Add a batch; one that is refused adds nothing.

        Args:
            features: H, in any floating-point precision.
            targets: Y, real (n, K) or (n,), or integer classes (n,).

        Raises:
            ValueError: shapes that are wrong or differ from earlier batches, an empty batch, NaN or infinite entries,
                several devices.
            TypeError: features that are not floating-point, or as in ``target_matrix``.
        """
        matrix = checked_targets(features, targets, self.num_classes)
        device, of_classes = matrix.device, not targets.is_floating_point()
        self._check_fits(features.shape[1], matrix.shape[1], of_classes, device)

        n, d, K = len(features), features.shape[1], max(matrix.shape[1], self.num_targets)
        self._start(d, K, of_classes)
        matrix = _widened(matrix, K)
        if self.sums is None and self.count + n <= d:
            self.rows.append(torch.cat([to_float64(features), matrix], dim=1))
            return
        sums = self._turn_to_sums(device)
        size = max(_CHUNK_ROWS, _CHUNK_NUMBERS // (d + K))
        for chunk, chunk_targets in zip(features.split(size), matrix.split(size), strict=True):
            sums.add_rows(chunk.detach().to(device), chunk_targets)

    def merge(self, other: "Moments") -> None:
        """Add the moments of other data, which are left as they were.

        Raises:
            ValueError: widths, kinds of targets or devices that differ.
        """
        if other.count == 0:
            return
        self._check_fits(other.num_features, other.num_targets, other.are_classes, other.device)
        d, K = other.num_features, max(self.num_targets, other.num_targets)
        self._start(d, K, other.are_classes)
        if self.sums is None and other.sums is None and self.count + other.count <= d:
            self.rows += [_widened(rows, d + K) for rows in other.rows]
            return
        sums = self._turn_to_sums(other.device)
        if other.sums is None:
            for rows in other.rows:
                sums.add_rows(*self._split(_widened(rows, d + K)))
        else:
            sums.add(other.sums.widened(K))

    def _start(self, d: int, K: int, of_classes: bool) -> None:
        """Set the widths; classes not seen before become columns of zeros."""
        if self.num_targets < K:
            self.rows = [_widened(rows, d + K) for rows in self.rows]
            self.sums = self.sums and self.sums.widened(K)
        self.num_features, self.num_targets, self.are_classes = d, K, of_classes

    def _turn_to_sums(self, device: torch.device) -> Sums | ClassSums:
        if self.sums is None:
            kind = ClassSums if self.are_classes else Sums
            self.sums = kind.zeros(self.num_features, self.num_targets, device)
            for rows in self.rows:
                self.sums.add_rows(*self._split(rows))
            self.rows = []
        return self.sums

    def _check_fits(self, d: int, K: int, of_classes: bool, device: torch.device) -> None:
        if self.count == 0:
            return
        if d != self.num_features:
            raise ValueError(f"features have width {d}, earlier ones {self.num_features}: they must agree")
        if of_classes != self.are_classes:
            kinds = ("real numbers", "classes")
            raise ValueError(f"targets are {kinds[of_classes]}, earlier ones {kinds[self.are_classes]}; pass one kind")
        if self.num_targets != K and not of_classes:
            raise ValueError(f"targets have width {K}, earlier ones {self.num_targets}: they must agree")
        if device != self.device:
            raise ValueError(f"the batch is on {device}, earlier ones on {self.device}; move them to one device")

    # ---- reading ----

    @property
    def count(self) -> int:
        """n, the number of samples so far."""
        return self.sums.count if self.sums is not None else sum(map(len, self.rows))

    @property
    def device(self) -> torch.device:
        """Where the sums are; the CPU before the first batch."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Memory of the rows or sums, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """The features' mean."""
        return self._mean()[: self.num_features].clone()

    @property
    def target_mean(self) -> Float[Tensor, " K"]:
        """The targets' mean; for classes, the fraction of samples in each."""
        return self._mean()[self.num_features :].clone()

    @property
    def scatter(self) -> Float[Tensor, "d d"]:
        """Σ (h − mean)(h − mean)ᵀ, the centred HᵀH; not divided by n."""
        if self.sums is None:
            H, _ = self.centred_rows()
            return H.mT @ H
        return self.sums.scatter

    @property
    def cross(self) -> Float[Tensor, "d K"]:
        """Σ (h − mean)(y − target_mean)ᵀ, the centred HᵀY; not divided by n."""
        if self.sums is None:
            H, Y = self.centred_rows()
            return H.mT @ Y
        return self.sums.cross.clone()

    @property
    def squares(self) -> Float[Tensor, " d"]:
        """Σ (h − mean)² of each feature, with constant features exactly zero."""
        if self.sums is None:
            return self.centred_rows()[0].square().sum(dim=0)
        return _without_rounding(self.sums.feature_squares, self.mean, self.count)

    @property
    def target_squares(self) -> Float[Tensor, " K"]:
        """Σ (y − target_mean)² of each target, with constant targets exactly zero."""
        if self.sums is None:
            return self.centred_rows()[1].square().sum(dim=0)
        return self.sums.target_squares()

    def centred_rows(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n K"]]:
        """H and Y less their means; only while the rows are kept (``sums`` is None)."""
        return self._split(centred(self._joint_rows()))

    @property
    def class_counts(self) -> Float[Tensor, " K"]:
        """n_c, the samples of each class; ``ValueError`` for real targets."""
        return self._by_class()[0]

    @property
    def class_scatter(self) -> Float[Tensor, "K K"]:
        """Σ (y − ȳ)(y − ȳ)ᵀ of the one-hot targets, diag(n_c) − n_c n_cᵀ/n; only for classes."""
        counts = self.class_counts
        return counts.diag() - counts.outer(counts) / self.count

    @property
    def class_means(self) -> Float[Tensor, "K d"]:
        """μ_c, zero for a class without samples; ``ValueError`` for real targets."""
        return self._by_class()[1]

    def within_products(self, directions: Float[Tensor, "d r"]) -> Float[Tensor, "r r"]:
        """Vᵀ Σ (h − μ_c)(h − μ_c)ᵀ V, the scatter within classes along the columns of V; only for classes."""
        if self.sums is not None:
            return directions.mT @ _mirrored(self.sums.within) @ directions
        rows, one_hot = self._split(self._joint_rows())
        _centre_by_class(rows, one_hot)
        coordinates = rows @ directions
        return coordinates.mT @ coordinates

    def _by_class(self) -> tuple[Float[Tensor, " K"], Float[Tensor, "K d"]]:
        if not self.are_classes:
            raise ValueError("the targets are real vectors; classes have counts and means: pass integer labels")
        if self.sums is not None:
            return self.sums.counts.clone(), self.sums.means.clone()
        return _centre_by_class(*self._split(self._joint_rows()))

    def _split(self, rows: Float[Tensor, "n p"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n K"]]:
        return rows.split([self.num_features, self.num_targets], dim=1)

    def _tensors(self) -> list[Tensor]:
        return [field for field in vars(self.sums).values() if isinstance(field, Tensor)] if self.sums else self.rows

    def _mean(self) -> Float[Tensor, " p"]:
        return self._joint_rows().mean(dim=0) if self.sums is None else self.sums.mean

    def _joint_rows(self) -> Float[Tensor, "n p"]:
        if not self.rows:
            raise ValueError("there are no samples yet; call update(features, targets) first")
        return torch.cat(self.rows)


def _without_rounding(squares: Tensor, mean: Tensor, count: int) -> Tensor:
    return squares.where(~(squares.sqrt() <= math.sqrt(count) * _CONSTANT * mean.abs()), 0.0)  # NaN stays


def _widened(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[-1]))
