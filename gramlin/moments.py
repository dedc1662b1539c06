"""Running moments of features and targets: what the measures of chapters 3 and 4 are computed from.

Rows are samples: features H (n, d), targets Y (n, K). Sums are float64 and centred as they are taken: each chunk of
rows about its own mean, then merged with what there is (Chan, Golub and LeVeque, 1983), so no digits are lost to a
large mean. Where targets are classes, features are centred on the means of their classes: at collapse, what is left
within classes is a vanishing part of the whole, and a difference of two large sums would lose it. Classes stay labels
throughout; the one-hot matrix is never formed of more rows than features. Nor is a matrix over pairs of samples, and
memory is O(d² + dK). While there are no more samples than features the rows themselves are kept, in float64: they are
smaller than the sums, and lose nothing.

What is measured are the values as they are stored, in whatever precision: each is taken to float64 before anything is
added to it, so that bfloat16 features give the figures of the same numbers in float64.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, Shaped
from torch import Tensor

from gramlin.checks import check_finite, check_floating, check_integer, check_one_device, check_tensor

# Rows are taken to float64 a chunk at a time: 1 MiB of them, which stay in a core's cache, and of wide rows 512, since
# each chunk passes over the whole sum.
_CHUNK_NUMBERS = 2**17
_CHUNK_ROWS = 512

# More numbers than that for the means of classes (8 GiB) are a mistake: labels that are no counted classes.
_MAX_CLASS_NUMBERS = 2**30

# Bounds of the largest entry: squares, and sums and products of a few of them, stay normal float64 numbers.
_SMALLEST, _LARGEST = 1e-140, 1e140

# Squared deviations below this have lost digits to float64's smallest numbers, or are all lost: as good as constant.
_UNDERFLOW = 1e-290

# A standard deviation below this fraction of the mean is the rounding of the mean: the column is constant.
_CONSTANT = 1e-13


def to_float64(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tensor in float64 and without gradient; on the CPU where its device (Apple's GPUs) has no float64."""
    return to_cpu_without_float64(tensor.detach()).double()


def to_cpu_without_float64(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The tensor on the CPU if its device (Apple's GPUs) has no float64, else where it is."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def chunk_rows(width: int) -> int:
    """How many rows of this width are taken to float64 at a time."""
    return max(_CHUNK_ROWS, _CHUNK_NUMBERS // width)


def target_values(
    targets: Float[Tensor, "n *outputs"] | Integer[Tensor, " n"], num_classes: int | None = None
) -> tuple[Float[Tensor, "n K"] | Int64[Tensor, " n"], int]:
    """Targets in float64 as a matrix, (n,) as a column, or as int64 labels if they are classes; and K.

    Args:
        targets: real (n, K) or (n,), or integer classes (n,) of any width, counted from 0.
        num_classes: K for classes; by default the largest class + 1.

    Raises:
        ValueError: another shape, a negative class, or one outside ``num_classes``; as in ``check_tensor``.
        TypeError: booleans, complex numbers, or integers of another shape than (n,); as in ``check_tensor``.
    """
    check_tensor("targets", targets)
    if targets.is_floating_point():
        if targets.ndim not in (1, 2) or 0 in targets.shape[1:]:
            raise ValueError(f"targets have shape {tuple(targets.shape)}; pass (n, K), (n,), or integer classes (n,)")
        matrix = to_float64(targets if targets.ndim == 2 else targets[:, None])
        return matrix, matrix.shape[1]
    if targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(f"targets are {targets.dtype}; pass real numbers, or classes as integers (targets.long())")
    if targets.ndim != 1:
        raise TypeError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}: integers are classes, of shape (n,); pass "
            "targets.float() if they are numbers"
        )
    check_finite("targets", targets)  # of integers: that they have data at all
    labels = targets.long()  # first: PyTorch has no minimum of unsigned integers
    least, largest = map(int, labels.aminmax()) if labels.numel() else (0, -1)
    if least < 0 and targets.dtype == torch.uint64:
        raise ValueError(f"targets have class {least + 2**64}; pass classes counted from 0 without gaps")
    if least < 0:
        raise ValueError(f"targets have class {least}; pass classes counted from 0")
    if num_classes is not None and largest >= num_classes:
        raise ValueError(f"targets have class {largest} with num_classes={num_classes}; pass a larger num_classes")
    return to_cpu_without_float64(labels), largest + 1 if num_classes is None else num_classes


def target_matrix(values: Float[Tensor, "n K"] | Int64[Tensor, " n"], K: int) -> Float[Tensor, "n K"]:
    """``target_values`` as a matrix, labels one-hot: for a chunk of rows, since it takes n · K numbers."""
    if values.is_floating_point():
        return values
    return torch.zeros(len(values), K, dtype=torch.float64, device=values.device).scatter_(1, values[:, None], 1.0)


def checked_targets(
    features: Float[Tensor, "n d"],
    targets: Float[Tensor, "n *outputs"] | Integer[Tensor, " n"],
    num_classes: int | None = None,
) -> tuple[Float[Tensor, "n K"] | Int64[Tensor, " n"], int]:
    """``target_values`` of a batch's targets, after a look at all that can be wrong with the batch.

    Raises:
        ValueError: features that are not (n, d), no samples, a different number of targets, NaN or infinite entries,
            several devices, numbers whose squares leave float64, labels too large to be classes that were counted; as
            in ``target_values``.
        TypeError: features that are not floating-point; as in ``target_values``.
    """
    check_features(features)
    values, K = target_values(targets, num_classes)
    if len(values) != len(features):
        raise ValueError(
            f"features have shape {tuple(features.shape)}, targets {tuple(targets.shape)}: the first axes must agree"
        )
    check_one_device({"features": features, "targets": targets})
    check_squares("features", features)
    if values.is_floating_point():
        check_squares("targets", values)
    elif K * features.shape[1] > _MAX_CLASS_NUMBERS:
        raise ValueError(
            f"{K} classes of {features.shape[1]} features take {K * features.shape[1] / 2**27:.2g} GiB: pass classes "
            "counted from 0 without gaps, e.g. torch.unique(targets, return_inverse=True)[1]"
        )
    return values, K


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


def check_squares(name: str, tensor: Float[Tensor, "*shape"]) -> None:
    """Raise ``ValueError`` if an entry is NaN or infinite, or if sums of squares would leave float64's range."""
    check_finite(name, tensor)
    if tensor.dtype != torch.float64 or tensor.numel() == 0:  # other types hold no such numbers
        return
    largest = max(map(abs, (bound.item() for bound in tensor.aminmax())))
    if largest and not _SMALLEST < largest < _LARGEST:
        raise ValueError(
            f"{name}: the largest entry is {largest:.3g}, and products of such numbers leave float64; rescale to have "
            f"it between {_SMALLEST:g} and {_LARGEST:g}"
        )


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
        parts = rows[:n].split([part.shape[1] for part in columns], dim=1)
        for part, given in zip(parts, columns, strict=True):
            part.copy_(given)  # and not torch.cat, which knows no common type of float64 and 8 bits
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

    def ordinary(self) -> "Sums":
        """With tensors that may be changed in place outside inference mode."""
        return Sums(self.count, *map(_ordinary, (self.mean, self.products, self.squares)))

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

    def add_rows(self, features: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> None:
        """Add one chunk of rows, at least one, with features in any precision.

        Of a class with N samples so far and n in the chunk, what is to be added is the scatter of the n about their
        mean m, and Nn/(N + n) times the square of the shift m − μ. Rows h − m + √(N/(N + n)) (m − μ) have both, since
        h − m sums to zero: no further rows are needed, also where each class has one sample in the chunk.
        """
        rows = self.means.new_empty(features.shape)
        rows.copy_(features)
        present, labels = torch.unique(labels, return_inverse=True)  # so that a small chunk passes over few classes
        counts, shifts, origin = _centre(rows, labels, len(present))
        before = self.counts.index_select(0, present)
        moves = (origin - self.means.index_select(0, present)).add_(shifts)
        kept = (before / (before + counts)).sqrt_()[:, None]
        rows -= shifts.addcmul_(kept, moves, value=-1).index_select(0, labels)
        _add_products(self.within, rows)
        self.counts.index_add_(0, present, counts)
        self.means.index_add_(0, present, moves.mul_((counts / (before + counts))[:, None]))

    def add(self, other: "ClassSums") -> None:
        """Add the sums of other rows, which are left as they were."""
        self.within += other.within
        moves = other.means - self.means
        weights = self.counts * other.counts / (self.counts + other.counts).clamp_min(1)
        _add_products(self.within, weights.sqrt()[:, None] * moves)
        self.counts += other.counts
        self.means += (other.counts / self.counts.clamp_min(1))[:, None] * moves

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

    def ordinary(self) -> "ClassSums":
        """With tensors that may be changed in place outside inference mode."""
        return ClassSums(*map(_ordinary, (self.counts, self.means, self.within)))

    def widened(self, K: int) -> "ClassSums":
        """With classes without samples up to K."""
        new = K - len(self.counts)
        return ClassSums(_widened(self.counts, K), F.pad(self.means, (0, 0, 0, new)), _ordinary(self.within))

    def _shifts(self) -> Float[Tensor, "K d"]:
        """Class means less the mean; zero for a class without samples."""
        return (self.means - self.mean[: len(self.within)]) * (self.counts > 0)[:, None]


def _centre(
    rows: Float[Tensor, "n d"], labels: Int64[Tensor, " n"], K: int
) -> tuple[Float[Tensor, " K"], Float[Tensor, "K d"], Float[Tensor, " d"]]:
    """Take their mean off the rows, in place; counts of classes, their means about it (0 without samples), the mean."""
    origin = rows.mean(dim=0)
    rows -= origin  # sums of what is left are small, and so is their rounding
    counts = torch.bincount(labels, minlength=K).to(rows.dtype)
    totals = rows.new_zeros(K, len(origin)).index_add_(0, labels, rows)
    return counts, totals.div_(counts.clamp_min(1)[:, None]), origin


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
        if num_classes is not None:
            check_integer("num_classes", num_classes, least=2)
        self.num_classes = num_classes
        self.num_features = self.num_targets = 0
        self.are_classes: bool | None = None
        # The rows while there are no more than num_features, each followed by its targets or its label.
        self.rows: list[Tensor] = []
        self.sums: Sums | ClassSums | None = None  # and their sums from then on

    # ---- adding ----

    # Sums begun in inference mode are ordinary tensors too: else they could not be added to outside it.
    @torch.inference_mode(False)
    @torch.no_grad()
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
        values, K = checked_targets(features, targets, self.num_classes)
        device, of_classes = values.device, not values.is_floating_point()
        self._check_fits(features.shape[1], K, of_classes, device)

        n, d, K = len(features), features.shape[1], max(K, self.num_targets)
        self._start(d, K, of_classes)
        if self.sums is None and self.count + n <= d:
            self.rows.append(torch.cat([to_float64(features), values.reshape(n, -1).double()], dim=1))
            return
        sums = self._turn_to_sums(device)
        size = chunk_rows(d if of_classes else d + K)
        for chunk, chunk_values in zip(features.split(size), values.split(size), strict=True):
            sums.add_rows(chunk.detach().to(device), chunk_values)

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, other: "Moments") -> None:
        """Add the moments of other data, which are left as they were.

        Raises:
            ValueError: ``num_classes``, widths, kinds of targets or devices that differ.
            TypeError: something else than moments.
        """
        if not isinstance(other, Moments):
            raise TypeError(f"other is a {type(other).__name__}; pass the Moments of other data")
        if None not in (self.num_classes, other.num_classes) and self.num_classes != other.num_classes:
            raise ValueError(f"num_classes is {other.num_classes} there, {self.num_classes} here: they must agree")
        if other.count == 0:
            return
        if other.are_classes and self.num_classes is not None and other.num_targets > self.num_classes:
            raise ValueError(f"there are {other.num_targets} classes to be added, num_classes is {self.num_classes}")
        of_classes = bool(other.are_classes)
        self._check_fits(other.num_features, other.num_targets, of_classes, other.device)
        K = max(self.num_targets, other.num_targets)
        self._start(other.num_features, K, of_classes)
        if self.sums is None and other.sums is None and self.count + other.count <= self.num_features:
            self.rows += other.rows
            return
        sums = self._turn_to_sums(other.device)
        if other.sums is None:
            for rows in other.rows:
                sums.add_rows(*other._split(rows))
        else:
            sums.add(other.sums.widened(K))  # type: ignore[arg-type]  # of one kind: _check_fits

    def _start(self, d: int, K: int, of_classes: bool) -> None:
        """Set the widths; classes not seen before get sums of no samples."""
        if self.sums is not None:
            self.sums = self.sums.widened(K) if self.num_targets < K else self.sums.ordinary()
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
            raise ValueError(f"targets are {kinds[of_classes]}, earlier ones {kinds[not of_classes]}; pass one kind")
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
        if self.sums is None:
            return self._split(self._joint_rows())[0].mean(dim=0)
        return self.sums.mean[: self.num_features].clone()

    @property
    def target_mean(self) -> Float[Tensor, " K"]:
        """The targets' mean; for classes, the fraction of samples in each."""
        if self.are_classes:
            return self.class_counts / self.count
        if self.sums is None:
            return self._split(self._joint_rows())[1].mean(dim=0)
        return self.sums.mean[self.num_features :].clone()

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
            return _without_underflow(centred(self._split(self._joint_rows())[0]).square().sum(dim=0))
        return _without_rounding(self.sums.feature_squares, self.mean, self.count)

    @property
    def target_squares(self) -> Float[Tensor, " K"]:
        """Σ (y − target_mean)² of each target, with constant targets exactly zero; of a class n_c(n − n_c)/n."""
        if self.are_classes:
            counts = self.class_counts
            return counts * (self.count - counts) / self.count
        if isinstance(self.sums, Sums):
            return self.sums.target_squares()
        return _without_underflow(self.centred_rows()[1].square().sum(dim=0))

    def centred_rows(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n K"]]:
        """H and Y less their means; only while the rows are kept (``sums`` is None)."""
        features, values = self._split(self._joint_rows())
        return centred(features), centred(target_matrix(values, self.num_targets))

    @property
    def class_counts(self) -> Float[Tensor, " K"]:
        """n_c, the samples of each class; ``ValueError`` for real targets."""
        return self._by_class()[0]

    @property
    def class_scatter_norm(self) -> Float[Tensor, ""]:
        """‖Σ (y − ȳ)(y − ȳ)ᵀ‖_F of the one-hot targets, which is diag(n_c) − n_c n_cᵀ/n; only for classes.

        Its diagonal is n_c(n − n_c)/n, its other entries −n_c n_c'/n: added up without the (K, K) matrix, and without
        a difference, the pairs of classes by running sums from the smallest on.
        """
        counts = self.class_counts.sort().values
        pairs = counts[1:].square() @ counts.square().cumsum(dim=0)[:-1]
        return ((counts * (self.count - counts)).square().sum() + 2 * pairs).sqrt() / self.count

    @property
    def class_means(self) -> Float[Tensor, "K d"]:
        """μ_c, zero for a class without samples; ``ValueError`` for real targets."""
        return self._by_class()[1]

    def within_products(self, directions: Float[Tensor, "d r"]) -> Float[Tensor, "r r"]:
        """Vᵀ Σ (h − μ_c)(h − μ_c)ᵀ V, the scatter within classes along the columns of V; only for classes."""
        if isinstance(self.sums, ClassSums):
            return directions.mT @ _mirrored(self.sums.within) @ directions
        rows, labels = self._split(self._joint_rows())
        _, shifts, _ = _centre(rows, labels, self.num_targets)
        coordinates = (rows - shifts.index_select(0, labels)) @ directions
        return coordinates.mT @ coordinates

    def _by_class(self) -> tuple[Float[Tensor, " K"], Float[Tensor, "K d"]]:
        if not self.are_classes:
            raise ValueError("the targets are real vectors; classes have counts and means: pass integer labels")
        if isinstance(self.sums, ClassSums):
            return self.sums.counts.clone(), self.sums.means.clone()
        counts, shifts, origin = _centre(*self._split(self._joint_rows()), self.num_targets)
        return counts, (origin + shifts) * (counts > 0)[:, None]

    def _split(self, rows: Float[Tensor, "n p"]) -> tuple[Float[Tensor, "n d"], Tensor]:
        """Features, and real targets (n, K) or labels (n,)."""
        features, values = rows.tensor_split([self.num_features], dim=1)
        return features, values[:, 0].long() if self.are_classes else values

    def _tensors(self) -> list[Tensor]:
        return [field for field in vars(self.sums).values() if isinstance(field, Tensor)] if self.sums else self.rows

    def _joint_rows(self) -> Float[Tensor, "n p"]:
        if not self.rows:
            raise ValueError("there are no samples yet; call update(features, targets) first")
        return torch.cat(self.rows)


def _without_rounding(squares: Tensor, mean: Tensor, count: int) -> Tensor:
    squares = squares.where(~(squares.sqrt() <= math.sqrt(count) * _CONSTANT * mean.abs()), 0.0)  # NaN stays
    return _without_underflow(squares)


def _without_underflow(squares: Tensor) -> Tensor:
    return squares.where(~(squares < _UNDERFLOW), 0.0)


def _widened(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[-1]))


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
