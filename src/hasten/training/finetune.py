"""The teacher whose judgement or whose distributions a run learns from."""

from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models import NAT, Autoregressive, GenerationModel
from hasten.pretrained import resolve
from hasten.spec import RunSpec
from hasten.training import checkpoint


def teacher_of(spec: RunSpec) -> str | None:
    """The name of the teacher that the model's settings name; None for an ordinary run."""
    setting = _setting(spec)
    return None if setting is None else setting[1]


def _setting(spec: RunSpec) -> tuple[str, str] | None:
    return getattr(spec.model, "learns_from", None)


def give_teacher(model: GenerationModel, spec: RunSpec, tokenizer: Tokenizer) -> None:
    """Load the teacher that `spec` names and hand it to the model; nothing for an ordinary run.

    Errors: `UserError` for a teacher that is missing, has another tokenizer, is not autoregressive, or takes fewer
    tokens than the student may say.
    """
    setting = _setting(spec)
    if setting is None:
        return
    key, name = setting
    assert isinstance(model, NAT | Autoregressive)
    _, theirs, teacher = checkpoint.read_run(resolve(name))
    place = f"{key} {name}"
    if theirs.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{place} has another tokenizer; set tokenizer.from_model = {name!r} too")
    if not isinstance(teacher, Autoregressive):
        raise UserError(f"{place} is a {type(teacher).__name__} model; give an autoregressive one")
    most = model.most_tokens_for(spec.data.max_tokens)
    if teacher.longest is not None and teacher.longest < most:
        raise UserError(
            f"{place} takes at most {teacher.longest} tokens, outputs may have {most}; lower data.max_tokens, or give "
            "a teacher whose attention has no max_length"
        )
    model.learn_from(teacher)
