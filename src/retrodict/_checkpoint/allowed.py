"""The classes and functions that a checkpoint may name, each by its exact name.

Whoever wrote a file chose the names and the values in it. A loaded object calls its functions when
it is used, with arguments from the same file. An entry here must therefore be harmless whatever it
is called with: it computes with arrays, and imports, evaluates, reads and writes nothing. A
function that takes a function is left out, since nothing in a model needs one.

Add an entry, raise `NAMES_VERSION`, and a file with the new name tells an older reader to upgrade.
"""

NAMES_VERSION = 2
"""The version of this list. Version 0 is release 0.1, which looked names up anywhere in six
packages; version 2 has the modules of `RENAMED`."""

_ACTIVATIONS = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
    log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
    sparse_sigmoid squareplus standardize swish tanh
"""

_ELEMENTWISE = """
    abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh cbrt ceil clip cos cosh
    deg2rad degrees divide exp exp2 expm1 fabs float_power floor fmax fmin hypot log log10 log1p
    log2 logaddexp logaddexp2 maximum minimum mod multiply negative positive power rad2deg radians
    reciprocal remainder round sign sin sinc sinh sqrt square subtract tan tanh true_divide
"""

_ARRAYS = """
    concatenate cross cumprod cumsum diag dot inner matmul max mean median min outer prod ravel std
    sum transpose tril triu vdot where
"""

_SPECIAL = """
    digamma entr erf erfc erfinv expit gammainc gammaincc gammaln i0 i0e i1 i1e log_ndtr logit
    logsumexp ndtr ndtri softmax xlog1py xlogy
"""

FUNCTIONS: dict[str, str] = {
    "jax.nn": _ACTIVATIONS,
    "jax.numpy": _ELEMENTWISE + _ARRAYS,
    "jax.numpy.linalg": "cholesky det inv norm slogdet",
    "jax.lax": "abs cos erf exp expm1 log log1p logistic rsqrt sin sqrt square tan tanh",
    "jax.scipy.special": _SPECIAL,
    # The default activation of the last layer of an MLP, which has no public name.
    "equinox.nn._mlp": "_identity",
}
"""Functions by module."""

DTYPES: dict[str, str] = {
    "jax.numpy": """
        bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16
        uint32 uint64 uint8
    """,
    "numpy": """
        bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16 uint32
        uint64 uint8
    """,
}
"""Types of numbers by module."""

ENUMS: dict[str, str] = {"jax.lax": "Precision"}
"""Enumerations by module."""

CLASSES: dict[str, str] = {
    "equinox.nn": """
        AvgPool1d AvgPool2d AvgPool3d Conv Conv1d Conv2d Conv3d ConvTranspose ConvTranspose1d
        ConvTranspose2d ConvTranspose3d Dropout Embedding GRUCell GroupNorm Identity LSTMCell Lambda
        LayerNorm Linear MLP MaxPool1d MaxPool2d MaxPool3d MultiheadAttention PReLU RMSNorm
        RotaryPositionalEmbedding Sequential
    """,
    "numpyro.distributions": """
        AsymmetricLaplace BernoulliLogits BernoulliProbs Beta BetaBinomial BinomialLogits
        BinomialProbs CategoricalLogits CategoricalProbs Cauchy Chi2 Dirichlet DirichletMultinomial
        DiscreteUniform ExpandedDistribution Exponential Gamma GammaPoisson GeometricLogits
        GeometricProbs Gumbel HalfCauchy HalfNormal Independent InverseGamma Laplace LogNormal
        Logistic LowRankMultivariateNormal MaskedDistribution MixtureSameFamily MultinomialLogits
        MultinomialProbs MultivariateNormal MultivariateStudentT NegativeBinomial2
        NegativeBinomialLogits NegativeBinomialProbs Normal Pareto Poisson SoftLaplace StudentT
        TransformedDistribution Uniform VonMises Weibull ZeroInflatedPoisson
    """,
    "numpyro.distributions.constraints": "_Real _Positive _Interval _GreaterThan",
    "numpyro.distributions.transforms": "AffineTransform ExpTransform",
    # States alone: an optimiser is functions.
    "optax": """
        AddNoiseState ApplyIfFiniteState EmaState EmptyState FactoredState
        InjectHyperparamsState InjectStatefulHyperparamsState MaskedNode MaskedState MultiStepsState
        PartitionState ScaleByAdaDeltaState ScaleByAdamState ScaleByAdanState ScaleByAmsgradState
        ScaleByBacktrackingLinesearchState ScaleByBeliefState ScaleByLBFGSState ScaleByLionState
        ScaleByNovogradState ScaleByRStdDevState ScaleByRmsState ScaleByRssState
        ScaleByScheduleState ScaleByZoomLinesearchState
        TraceState ZoomLinesearchInfo
    """,
    "retrodict": """
        AdditiveFunctional AssimilationFamily BackwardSampling Bounded ClosedForm
        ConjugateFamily Cubature Diagonal DistributionKernel FitResult Forecast Frozen
        GatedFamily GaussHermite Gaussian GaussianMixture Grid GridPosterior InitialTerm
        KalmanFamily LinearGaussianChain LinearGaussianKernel LogJoint MixtureFamily
        NaturalGaussian NonlinearFamily NonlinearGaussianKernel Observations PairTerm
        ParameterErrors ParticlePosterior Positive PositiveTril Quadrature RaoBlackwellised
        RecurrentFamily Recursive SampledChain ScanFamily Score SecondMoments Smoothed
        StateFunctional StateSpaceModel StateSum StateTerm Taylor Unscented
        VaryingLinearGaussianKernel
    """,
    "retrodict._exact.kalman_smoother": "KalmanPosterior",
    "retrodict._expectations.elbo": "RunningElboState",
    "retrodict._expectations.expectation": "Estimate Marginals",
    "retrodict._expectations.recursive": "RecursiveState",
    "retrodict._learning.em": "EMResult",
    "retrodict._learning.fit_evidence": "EvidenceResult",
    "retrodict._linearised.posterior": "LinearisedPosterior",
    "retrodict._smooth.simulate_like": "Simulated",
    "retrodict.bounds": """
        AnyBounded AnyLipschitz ErrorBound FiniteBounds FiniteProblem Mixing PosteriorCheck
    """,
    "retrodict.online": """
        FixedLag KalmanScore LagMoments LagOutput LagRows LagState LaggedLearnerOutput
        LaggedLearnerState LearnerOutput LearnerState OnlineSmoother QuadraticFeatures
        RandomFeatures RecursivePathwise RecursiveScore RowGradient RunningElbo RunningOutput
        RunningPosterior RunningState TruncatedBackprop WeightedSamples
    """,
    "retrodict.particles": """
        AdditivePosterior ChainProposal ExactBackward Genealogy Guided GuidedPosterior
        ImportancePosterior MCMCBackward OnlineState ParticleFilterPosterior RejectionBackward
    """,
    # Private records of which the public ones are made.
    "retrodict.bounds.finite.bounds": "FiniteContributions",
    "retrodict.bounds.finite.quantities": "FiniteQuantities",
    "retrodict._chains.defensive": "DefensiveKernel DefensiveLaw DefensiveStep",
    "retrodict._numerics.ldl": "Factored StandardKernel",
    "retrodict._families.base": "Factor Row",
    "retrodict._families.network": "Embedded RecurrentState Transition",
    "retrodict._families.readout": "BackwardStart",
    "retrodict._families.recursions": "GaussianState",
    "retrodict._families.start": "Coordinates",
    "retrodict._families.assimilation": "Sites",
    "retrodict._families.conjugate": "Potential",
    "retrodict._families.kalman": "Evidence FilterState",
    "retrodict._families.mixture": "MixtureKernel MixtureStep",
    "retrodict._families.nonlinear": """
        MixtureCorrection NonlinearKernel NonlinearMixtureKernel NonlinearStep
    """,
    "retrodict._families.scan": "ScanLayer ScanState",
    "retrodict._expectations.functionals": """
        LogEmission LogPrior LogTransition SecondMomentSums
    """,
    "retrodict._exact.grid.diagnosis": "Diagnostics ErrorEstimate",
    "retrodict._exact.grid.posterior": "Held",
    "retrodict._exact.grid.transition": "BlockedTransition DenseTransition SeparableTransition",
    "retrodict._exact.kalman_filter": "Filtered Prior Transition Whitened",
    "retrodict._linearised.diagnosis": "Diagnostics",
    "retrodict._series": "Series",
    "retrodict.online.exact": "ExactStatistics",
    "retrodict.online.followed": "Followed Sums",
    "retrodict.online.kalman": "KalmanScoreState",
    "retrodict.online.pathwise": "Frame PathwiseState",
    "retrodict.online.samples": "SampleStatistics",
    "retrodict.online.score": "ScoreState",
    "retrodict.online.sensitivity": "Followed Numbers",
    "retrodict.online.truncated": "TruncatedState",
    "retrodict._parameters": "StationaryCoefficients",
    "retrodict.particles.cloud": "Filter",
    "retrodict.particles.proposal": "_MeanLookahead",
    "retrodict._learning.train": "TrainHistory TrainState",
    "retrodict.models._counts": "BinomialLaw NegativeBinomialLaw PoissonLaw",
    "retrodict.models._equations": """
        ConstantVelocity Lagged LinearDynamics MeanReverting Observed Regular Stationary Structural
    """,
    "retrodict.models._neural": "ObservationStd",
    "retrodict.models._tracking": """
        RangeAndBearing RangeBearingLaw RangeBearingStd WrappedRangeBearing
    """,
    "retrodict.models._volatility": "VolatilityEmission",
}
"""Classes by module, of which a file may build an instance from its fields."""


RENAMED: dict[str, str] = {
    "retrodict._bounds.finite.bounds": "retrodict.bounds.finite.bounds",
    "retrodict._bounds.finite.quantities": "retrodict.bounds.finite.quantities",
    "retrodict._chain.defensive": "retrodict._chains.defensive",
    "retrodict._factored": "retrodict._numerics.ldl",
    "retrodict._family._base": "retrodict._families.base",
    "retrodict._family._network": "retrodict._families.network",
    "retrodict._family._readout": "retrodict._families.readout",
    "retrodict._family._recursions": "retrodict._families.recursions",
    "retrodict._family._start": "retrodict._families.start",
    "retrodict._family.assimilation": "retrodict._families.assimilation",
    "retrodict._family.conjugate": "retrodict._families.conjugate",
    "retrodict._family.kalman": "retrodict._families.kalman",
    "retrodict._family.mixture": "retrodict._families.mixture",
    "retrodict._family.nonlinear": "retrodict._families.nonlinear",
    "retrodict._family.scan": "retrodict._families.scan",
    "retrodict._functional": "retrodict._expectations.functionals",
    "retrodict._grid.diagnosis": "retrodict._exact.grid.diagnosis",
    "retrodict._grid.posterior": "retrodict._exact.grid.posterior",
    "retrodict._grid.transition": "retrodict._exact.grid.transition",
    "retrodict._kalman._operations": "retrodict._exact.kalman_filter",
    "retrodict._mask": "retrodict._series",
    "retrodict._online.exact": "retrodict.online.exact",
    "retrodict._online.followed": "retrodict.online.followed",
    "retrodict._online.kalman": "retrodict.online.kalman",
    "retrodict._online.pathwise": "retrodict.online.pathwise",
    "retrodict._online.samples": "retrodict.online.samples",
    "retrodict._online.score": "retrodict.online.score",
    "retrodict._online.sensitivity": "retrodict.online.sensitivity",
    "retrodict._online.truncated": "retrodict.online.truncated",
    "retrodict._particle.cloud": "retrodict.particles.cloud",
    "retrodict._particle.proposal": "retrodict.particles.proposal",
    "retrodict._train": "retrodict._learning.train",
    "retrodict:AdditivePosterior": "retrodict.particles:AdditivePosterior",
    "retrodict:AnyBounded": "retrodict.bounds:AnyBounded",
    "retrodict:AnyLipschitz": "retrodict.bounds:AnyLipschitz",
    "retrodict:ChainProposal": "retrodict.particles:ChainProposal",
    "retrodict:EMResult": "retrodict._learning.em:EMResult",
    "retrodict:ErrorBound": "retrodict.bounds:ErrorBound",
    "retrodict:Estimate": "retrodict._expectations.expectation:Estimate",
    "retrodict:EvidenceResult": "retrodict._learning.fit_evidence:EvidenceResult",
    "retrodict:ExactBackward": "retrodict.particles:ExactBackward",
    "retrodict:Factor": "retrodict._families.base:Factor",
    "retrodict:FiniteBounds": "retrodict.bounds:FiniteBounds",
    "retrodict:FiniteProblem": "retrodict.bounds:FiniteProblem",
    "retrodict:FixedLag": "retrodict.online:FixedLag",
    "retrodict:Genealogy": "retrodict.particles:Genealogy",
    "retrodict:Guided": "retrodict.particles:Guided",
    "retrodict:GuidedPosterior": "retrodict.particles:GuidedPosterior",
    "retrodict:ImportancePosterior": "retrodict.particles:ImportancePosterior",
    "retrodict:KalmanPosterior": "retrodict._exact.kalman_smoother:KalmanPosterior",
    "retrodict:KalmanScore": "retrodict.online:KalmanScore",
    "retrodict:LagMoments": "retrodict.online:LagMoments",
    "retrodict:LagOutput": "retrodict.online:LagOutput",
    "retrodict:LagRows": "retrodict.online:LagRows",
    "retrodict:LagState": "retrodict.online:LagState",
    "retrodict:LaggedLearnerOutput": "retrodict.online:LaggedLearnerOutput",
    "retrodict:LaggedLearnerState": "retrodict.online:LaggedLearnerState",
    "retrodict:LearnerOutput": "retrodict.online:LearnerOutput",
    "retrodict:LearnerState": "retrodict.online:LearnerState",
    "retrodict:LinearisedPosterior": "retrodict._linearised.posterior:LinearisedPosterior",
    "retrodict:MCMCBackward": "retrodict.particles:MCMCBackward",
    "retrodict:Marginals": "retrodict._expectations.expectation:Marginals",
    "retrodict:Mixing": "retrodict.bounds:Mixing",
    "retrodict:OnlineSmoother": "retrodict.online:OnlineSmoother",
    "retrodict:OnlineState": "retrodict.particles:OnlineState",
    "retrodict:ParticleFilterPosterior": "retrodict.particles:ParticleFilterPosterior",
    "retrodict:PosteriorCheck": "retrodict.bounds:PosteriorCheck",
    "retrodict:QuadraticFeatures": "retrodict.online:QuadraticFeatures",
    "retrodict:RandomFeatures": "retrodict.online:RandomFeatures",
    "retrodict:RecursivePathwise": "retrodict.online:RecursivePathwise",
    "retrodict:RecursiveScore": "retrodict.online:RecursiveScore",
    "retrodict:RecursiveState": "retrodict._expectations.recursive:RecursiveState",
    "retrodict:RejectionBackward": "retrodict.particles:RejectionBackward",
    "retrodict:RowGradient": "retrodict.online:RowGradient",
    "retrodict:RunningElbo": "retrodict.online:RunningElbo",
    "retrodict:RunningElboState": "retrodict._expectations.elbo:RunningElboState",
    "retrodict:RunningOutput": "retrodict.online:RunningOutput",
    "retrodict:RunningPosterior": "retrodict.online:RunningPosterior",
    "retrodict:RunningState": "retrodict.online:RunningState",
    "retrodict:SecondMomentSums": "retrodict._expectations.functionals:SecondMomentSums",
    "retrodict:Simulated": "retrodict._smooth.simulate_like:Simulated",
    "retrodict:TruncatedBackprop": "retrodict.online:TruncatedBackprop",
    "retrodict:WeightedSamples": "retrodict.online:WeightedSamples",
}
"""Modules that were renamed since version 0.1, whose files name them as they were."""


def current_name(name: str) -> str:
    """Return today's form of a name `module:attribute` from a file."""
    module, colon, attribute = name.partition(":")
    return RENAMED.get(module, module) + colon + attribute


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{module}:{name}" for module, text in table.items() for name in text.split())


RECORD_NAMES = _names(CLASSES)
"""Names of classes that a file may build."""

VALUE_NAMES = _names(FUNCTIONS) | _names(DTYPES)
"""Names that may stand for themselves: functions and types of numbers."""

ENUM_NAMES = _names(ENUMS)
"""Names of enumerations of which a file may hold a member."""

FUNCTION_NAMES = _names(FUNCTIONS)
"""Names of functions of which a file may hold a partial."""
