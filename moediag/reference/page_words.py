"""Entries of the words that pages print: labels, answers, confidence, what is said of a fix."""

from __future__ import annotations

from moediag.diagnosis import CONFIDENCE, RULES
from moediag.reference.finding_entries import detector_word
from moediag.reference.word_entry import Entry
from moediag.result.answer_blocks import AnswerState

WORDS = {
    "culprit": "A rank that diverged first: it failed, made a different call from the others, "
    "or never reached a call. No culprit is named where the evidence does not show one.",
    "victim": "A rank that waits for a culprit. It did what it should.",
    "suspect": "A rank or a machine that may be the cause. The evidence does not show that it is.",
    "cause": "Why it failed, in a sentence: what was seen, with the line of the program.",
    "where": "The lines of the program at which the ranks are, or where a finding shows.",
    "why": "The reason of the verdict: what was seen, or what should hold and does not.",
    "what": "What fails: the variant, the relation or the scenario, and how.",
    "next": "What to change, where to look, or what to type next.",
    "sure": "How sure the answer of a bisect is, and from how many probes.",
    "first divergence": "The first call at which the ranks' schedules differ, and what each rank "
    "did there. A schedule is the sequence of collectives of a rank in one group.",
    "gradients": "How many gradients differ from those of one process, and by how much.",
    "stacks": "The functions in which the ranks were, innermost first. Ranks with similar stacks "
    "are one group.",
    "table": "Numbers behind the verdict, side by side.",
    "note": "A fact that a reader of the verdict must know. It is not a failure.",
    "time": "How long the launch and the diagnosis took.",
    "not seen": "Evidence that could not be collected or read. Nothing is claimed about it.",
    "attached": "What other programs reported about the machine; the HTML page has it.",
    "evidence": "The folder of the files that the verdict rests on.",
    "details": "The command that also shows schedules and stacks.",
    "html": "The command that writes the page as HTML.",
    "meaning": "The command that explains the verdict.",
    "again": "The command that shows the page again.",
    "report": "The file or the folder that holds the whole page.",
    "with": "The options with which the run differs from the scenario.",
    "result": "The conclusion over all trials of the run.",
    "claims": "One line for each unfixed variant: whether the failure was reproduced.",
    "fixes": "What each fix does: whether it is correct, its step time relative to the healthy "
    "unfixed step (median, quartiles of the rounds), and which one is the cheapest correct one.",
    "controls": "Variants that must be clean. If one fails, the comparison proves nothing.",
    "marks": "What the marks in the table of a matrix mean.",
    "behind": "The ranks that recorded the fewest events: they are the last to arrive. By how many "
    "events is in the column of the same name.",
    "step": "Steps of the optimizer that a rank has made.",
    "waste": "What ranks hold or send without need: padding, ranks without experts.",
    "memory": "Resident memory of a rank's process.",
    "state": "What a rank does now: it computes, waits in a call, sleeps, or has ended.",
    "correct": "The fix is clean in every repeat: ranks agree and gradients equal the reference.",
    "right": "The fix repairs the failure; pages print `correct`.",
    "wrong": "The fix does not repair the failure, or breaks something else.",
    "no effect": "The fix leaves the failure as it is.",
    "makes it worse": "With the fix more fails than without it.",
    "unknown": "It could not be judged.",
    "cheapest correct": "The correct fix with the smallest median step time, each round compared "
    "with the unfixed step of the same round.",
    "reproduced": "Every unfixed variant failed as the scenario expects, beside clean controls.",
    "not reproduced": "No unfixed variant failed as the scenario expects.",
    "expectation": "The verdict that a scenario demands of a variant.",
    "signature": "What two failures must share to be the same: verdict, operation or exception, "
    "stable frames, axis, and the pattern of ranks.",
    "rank": "One process of a distributed job.",
    "variant": "One code path of a scenario: unfixed, a fix or a control.",
    "trial": "One launch of one variant.",
    "unsure": "A finding of the hunt that did not meet its conditions, such as to show twice.",
    "new": "A failure or a finding that the register or earlier nights do not have.",
    "known": "A finding that the register lists with its report.",
    "by design": "A finding that the library's documentation states.",
    "found": "A finding of the register that has not been reported yet.",
    "appeared": "A finding of the newer release that the older one does not have.",
    "gone": "A finding of the older release that the newer one does not have.",
    "fixed": "A variant that failed on an earlier night and does not fail any more.",
    "still": "A failure that an earlier night had too.",
    "flaky": "The same stack gave different results on different nights or in repeats.",
    "left out": "A job that did not fit into the time of the night; it comes first next time.",
    "fails": "The step cannot run, or a part of what was asked has no effect.",
    "may fail": "It fails under a condition that the text names.",
    "will fail": "The step cannot run on this layout, or does not fit on the card.",
    "wasteful": "It runs, but ranks hold no expert, or at least a tenth of the gathered bytes is "
    "padding.",
    "safe": "The check found nothing that fails and no waste.",
    "fits": "The step fits, and at least a tenth of the card is left for what is not modelled.",
    "tight": "The step fits, but less than a tenth of the card is left.",
    "does not fit": "The step needs more memory than the card has; the line has the smallest "
    "change under which it fits.",
    "peak": "The largest memory of a rank during a step, by part: state (parameters, gradients, "
    "optimizer), gathered parameters, activations, temporary tensors of the backward.",
    "better": "What to type to compare the layout with all others of as many ranks.",
    "worst load": "The peak if all other ranks send this one as many tokens as they can.",
    "padding": "Bytes that are gathered or reduced only because rows do not divide.",
    "plan": "For each parameter the mesh axes that divide it, and what a rank holds.",
    "sharded": "Which function divides the model over the ranks.",
    "sums": "The mesh axes over which gradients must be summed.",
    "model": "The class that was planned, with its size.",
    "unit": "One group of FSDP2: the parameters that one call gathers.",
    "perhaps here": "One of several lines at which the ranks may have taken different ways.",
    "schedule": "The sequence of collective calls of a rank in one process group.",
    "group": "A torch process group: the ranks that a collective connects. `world` is all ranks.",
    "world": "The process group of all ranks, or their number.",
    "recorder": "The part of moediag in each rank that writes its calls to a file.",
    "probe": "One release that a bisect tries.",
    "cell": "One relation checked on one family.",
    "finding": "A problem with its evidence: the ranks, the lines, the cause and the next step.",
    "unfixed": "The code as it was released, without any fix.",
    "fix": "A change that may repair the failure; a run tries each one.",
    "register": "The list of findings that are known already; a hunt shows the others as new.",
    "starting": "The rank has not yet made a call that was recorded.",
    "running": "The rank computes or takes batches.",
    "waiting": "The rank waits in a collective call.",
    "finished": "The rank's program has ended normally.",
    "error": "Something that moediag could not do, with the reason and what to type.",
}
STATES = {
    AnswerState.AS_EXPECTED: "Everything that was expected holds.",
    AnswerState.NO_FAILURE: "Nothing that fails was found in what was seen.",
    AnswerState.ANSWERED: "The question has an answer.",
    AnswerState.BROKEN: "A variant has another verdict than the scenario expects.",
    AnswerState.FAILURE: "Something fails.",
    AnswerState.INCONCLUSIVE: "It could not be decided; the page says why.",
    AnswerState.CANNOT_RUN: "This machine cannot run it; the page says what is missing.",
    AnswerState.BUG: "moediag itself failed. Please report it.",
}


def words() -> list[Entry]:
    """One entry for each word of a page that is no verdict, law, option or scenario."""
    levels = ", ".join(CONFIDENCE)
    return [
        *(Entry("word", word, (meaning,)) for word, meaning in WORDS.items()),
        *(
            Entry("word", str(state), (meaning, f"The exit code is {state.exit_code}."))
            for state, meaning in STATES.items()
            if state != AnswerState.INCONCLUSIVE  # a verdict too
        ),
        Entry("word", "confidence", (f"How sure a verdict is: {levels}.",),
              tuple((str(level), text) for level, text in CONFIDENCE.items()), "Levels"),
        *(Entry("word", str(level), (text,)) for level, text in CONFIDENCE.items()),
        *(
            Entry("detector", detector_word(one.name),
                  (one.finds, f"What it finds has the verdict {one.verdict}."),
                  commands=(f"moediag explain {one.verdict}",))
            for one in RULES if not one.is_law
        ),
    ]  # fmt: skip
