/* The protocol of docs/protocol.md, for spin to try in every order of events.
 *
 * RANKS ranks run one program, and the program is any that rule 9 allows: plan, dispatch, combine and
 * release in any order that makes sense, the same on all ranks, and the finish of each half wherever
 * a rank likes. It never ends, so what holds here holds for any number of steps.
 *
 * Memory is modelled by what it is about: one cell for all rows that one rank writes to another in
 * one generation, and in it the step they belong to. Who reads asserts the step. So rows that come
 * too late or are overwritten too early are failed assertions, and ranks that wait for ever are a
 * state without an end.
 *
 * Not modelled: what rows contain, and the order in which memory lets writes through. A strong signal
 * is taken at its word: who sees it sees all that was written before it.
 *
 * scripts/check_model.sh sets RANKS, DEPTH, and of these what a run is about:
 *   PUSH       results go home by writes; otherwise home reads them (pull)
 *   PLANS      the program has plan() in it; with ONLY_PLANS nothing else
 *   UNPAIRED   dispatches without a combine: release(), or reuse without it
 *   HALVES     begins of other halves between a begin and its finish
 *   DEATH      a rank ends or stops at any point, at most one
 *   ENDS       with DEATH: whether every other rank then ends
 * and, to see that they are found, MISTAKE and one of REUSE_EARLY, NO_CREDIT, ONE_COUNT_GENERATION,
 * SIGNAL_FIRST, RETURN_EARLY, ANY_EPOCH, OTHER_ORDER, EXPERTS_LATE, RESULTS_EARLY, KEEP_QUIET.
 */

/* Epochs go round after LAPS uses of a generation, so that the model is finite. That two are enough,
 * because nobody signals again before its last signal was waited for, is asserted at every signal. */
#define LAPS 2
#define STEPS (LAPS * DEPTH)
#define NOTHING 255 /* of no step */
#define NEXT(n, end) (((n) + 1) % (end))

#ifdef ONE_COUNT_GENERATION
#define COUNT_GENERATIONS 1
#else
#define COUNT_GENERATIONS 2
#endif
#define PLAN_SERIALS (LAPS * COUNT_GENERATIONS)

/* ---- Windows --------------------------------------------------------------------------------- */

/* Channels, and where each generation's signal words lie behind one another. */
#define COUNTS 0
#define DISPATCH COUNT_GENERATIONS
#define COMBINE (DISPATCH + DEPTH)
#define CREDIT (COMBINE + DEPTH)
#define WORDS (CREDIT + DEPTH)

/* Everything in the window of `owner`, written by or for `peer`. */
#define AT(owner, word, peer) (((owner) * WORDS + (word)) * RANKS + (peer))
byte signals[RANKS * WORDS * RANKS];
#define SIGNAL(owner, word, peer) signals[AT(owner, word, peer)]
bool untaken[RANKS * WORDS * RANKS]; /* for the assertion only: signalled, not yet waited for */
#define UNTAKEN(owner, word, peer) untaken[AT(owner, word, peer)]

byte counts[RANKS * COUNT_GENERATIONS * RANKS] = NOTHING;
#define COUNTS_OF(owner, generation, peer) \
  counts[((owner) * COUNT_GENERATIONS + (generation)) * RANKS + (peer)]

byte rows[RANKS * DEPTH * RANKS] = NOTHING;
#define ROWS(owner, generation, peer) rows[((owner) * DEPTH + (generation)) * RANKS + (peer)]

/* Pull: what `owner` computed for `peer`. Push: what `peer` computed for `owner`. */
byte results[RANKS * DEPTH * RANKS] = NOTHING;
#define RESULTS(owner, generation, peer) results[((owner) * DEPTH + (generation)) * RANKS + (peer)]

#ifdef DEATH
byte fault[RANKS]; /* 0, or 1 + the rank that is to blame */
byte waiting[RANKS]; /* 0, or 1 + the rank that this one waits for: so root_of() finds whom to blame, */
byte word[RANKS];    /* at which of its words, */
byte until[RANKS];   /* and for which epoch */
bool ended[RANKS]; /* its process is gone, or its thread has let go of the window: not alive() */
byte victim = RANKS; /* who has ended without a word, or has stopped */
#define NOW_WAITING(at_word, for_epoch) \
  if \
  :: peer != me -> waiting[me] = peer + 1; word[me] = at_word; until[me] = for_epoch \
  :: else -> waiting[me] = 0; word[me] = 0; until[me] = 0 \
  fi
#else
#define NOW_WAITING(at_word, for_epoch)
#endif

/* ---- The program ----------------------------------------------------------------------------- */

/* What each rank has still to begin. Whoever comes first to a new place in the program chooses what
 * stands there and writes it into the others' lists; so all begin the same, in the same order. */
mtype = { plan, dispatch, combine, release };
chan todo[RANKS] = [DEPTH + 2] of { mtype, byte };

/* The half that is next, and what it is of: a step, or the serial of a plan. */
#define NEXT_IS(half, which) (empty(todo[me]) || todo[me]?[half, which])
#define TAKE(half, which) if :: todo[me]?half,which :: empty(todo[me]) -> choose(half) fi

inline choose(half) {
  peer = NEXT(me, RANKS);
  do
  :: peer == me -> break
  :: else ->
     assert(nfull(todo[peer])); /* ranks are never further apart than this */
     todo[peer]!half,which;
     peer = NEXT(peer, RANKS)
  od
}

/* ---- Signals: Window::signal_all, wait_all --------------------------------------------------- */

#ifdef ANY_EPOCH /* whatever was ever signalled will do */
bool ever[RANKS * WORDS * RANKS];
#define HAS_COME(word, epoch) ever[AT(me, word, peer)]
#else
#define HAS_COME(word, epoch) (SIGNAL(me, word, peer) == epoch)
#endif

inline signal_all(channel, generation, epoch) {
  peer = NEXT(me, RANKS);
  do
  :: atomic {
       peer != me ->
#ifndef MISTAKE /* it is to show where it hurts */
       assert(!UNTAKEN(peer, channel + generation, me));
#endif
       SIGNAL(peer, channel + generation, me) = epoch;
       UNTAKEN(peer, channel + generation, me) = true;
       printf("rank %d signals rank %d\n", me, peer);
#ifdef ANY_EPOCH
       ever[AT(peer, channel + generation, me)] = true;
#endif
       peer = NEXT(peer, RANKS)
     }
  :: peer == me -> break
  od
}

inline wait_all(channel, generation, epoch) {
  atomic {
    peer = NEXT(me, RANKS);
    NOW_WAITING(channel + generation, epoch)
  };
  do
  :: atomic {
       peer != me && HAS_COME(channel + generation, epoch) ->
       UNTAKEN(me, channel + generation, peer) = false;
       printf("rank %d has the signal of rank %d\n", me, peer);
       peer = NEXT(peer, RANKS);
       NOW_WAITING(channel + generation, epoch)
     }
  :: peer == me -> break
#ifdef DEATH
  :: peer != me && fault[me] != 0 -> goto failed
  :: peer != me && fault[me] == 0 && ended[peer] && !HAS_COME(channel + generation, epoch) ->
     blamed = peer; goto give_up
  :: timeout -> goto find_root /* the deadline is longer than all that can still happen */
#endif
  od
}

/* ---- The payload: one move for all peers ------------------------------------------------------ */

/* What happens between two writes of one send cannot make them less early, and what happens between
 * two reads cannot make them less late: nobody is told of either. So they are one move each. */
#define for_all_peers(statement) \
  atomic { \
    peer = NEXT(me, RANKS); \
    do \
    :: peer == me -> break \
    :: else -> statement; peer = NEXT(peer, RANKS) \
    od \
  }

/* ---- plan ------------------------------------------------------------------------------------- */

inline exchange_counts() {
  g = serial % COUNT_GENERATIONS;
  for_all_peers(COUNTS_OF(peer, g, me) = serial);
  signal_all(COUNTS, g, (serial / COUNT_GENERATIONS + 1) % LAPS);
  wait_all(COUNTS, g, (serial / COUNT_GENERATIONS + 1) % LAPS);
  for_all_peers(assert(COUNTS_OF(me, g, peer) == serial));
  serial = NEXT(serial, PLAN_SERIALS)
}

/* ---- dispatch --------------------------------------------------------------------------------- */

/* The experts read rows and write results at any time between finish() and combine_begin(). What can
 * go wrong shows best if they write as early as they may, and read as late. */
inline write_results() {
#ifdef PUSH
  skip
#else
  for_all_peers(RESULTS(me, g, peer) = step[g]) /* combine_input() */
#endif
}
inline read_rows() {
  for_all_peers(assert(ROWS(me, g, peer) == step[g]))
}

inline send_credits() {
  credit_epoch[g] = NEXT(credit_epoch[g], LAPS);
  signal_all(CREDIT, g, credit_epoch[g])
}

/* Makes generation g free. After paired use it is (rule 4); otherwise all say so (rule 6). */
inline enter() {
  if
  :: phase[g] == received -> read_rows(); send_credits(); phase[g] = released
  :: else
  fi;
  if
#ifndef NO_CREDIT
  :: phase[g] == released -> wait_all(CREDIT, g, credit_epoch[g])
#endif
  :: else
  fi
}

inline dispatch_begin() {
  enter();
  atomic {
#ifdef RETURN_EARLY
    last_step = step[g];
#endif
    step[g] = which;
    steps = NEXT(steps, STEPS);
    dispatch_epoch[g] = NEXT(dispatch_epoch[g], LAPS)
  };
#ifdef SIGNAL_FIRST
  signal_all(DISPATCH, g, dispatch_epoch[g]);
  for_all_peers(ROWS(peer, g, me) = step[g]);
#else
  for_all_peers(ROWS(peer, g, me) = step[g]);
  signal_all(DISPATCH, g, dispatch_epoch[g]);
#endif
#ifdef RETURN_EARLY /* only now what the last combine asked its peers for comes in */
  if
  :: last_step != NOTHING -> for_all_peers(assert(RESULTS(peer, g, me) == last_step))
  :: else
  fi;
#endif
#ifdef RESULTS_EARLY /* the experts do not wait for finish() */
  write_results();
#endif
  phase[g] = sending
}

inline dispatch_finish() {
  wait_all(DISPATCH, g, dispatch_epoch[g]);
#ifndef RESULTS_EARLY
  write_results();
#endif
  phase[g] = received
}

/* ---- combine ---------------------------------------------------------------------------------- */

inline combine_begin() {
#ifndef EXPERTS_LATE
  read_rows();
#endif
#ifdef PUSH
  for_all_peers(RESULTS(peer, g, me) = step[g]);
#endif
  combine_epoch[g] = NEXT(combine_epoch[g], LAPS);
  signal_all(COMBINE, g, combine_epoch[g]);
#ifdef EXPERTS_LATE
  read_rows();
#endif
  phase[g] = combining
}

inline combine_finish() {
  wait_all(COMBINE, g, combine_epoch[g]);
#ifdef PUSH
  for_all_peers(assert(RESULTS(me, g, peer) == step[g]));
#elif !defined(RETURN_EARLY)
  for_all_peers(assert(RESULTS(peer, g, me) == step[g]));
#endif
  phase[g] = unused
}

inline release_rows() {
  read_rows();
  send_credits();
  phase[g] = released
}

/* ---- Faults: Window::raise -------------------------------------------------------------------- */

#ifdef DEATH
inline tell_all() {
  peer = NEXT(me, RANKS);
  do
  :: peer == me -> break
  :: else ->
     atomic {
       if
       :: fault[peer] == 0 -> fault[peer] = fault[me]
       :: else
       fi;
       printf("rank %d tells rank %d that rank %d has failed\n", me, peer, fault[me] - 1);
       peer = NEXT(peer, RANKS)
     }
  od
}
#endif

/* ---- A rank ----------------------------------------------------------------------------------- */

/* The phases of a generation as in src/exchange/state.hpp, but that `combined` is `unused` again. */
mtype = { unused, sending, received, combining, released };
mtype = { finish_dispatch, finish_combine };

/* For conditions on a generation: whether any meets it, and g = one that does. */
#define ANY(condition, what) (condition(0, what) || condition(DEPTH - 1, what))
#define PICK(condition, what) \
  if :: condition(0, what) -> g = 0 :: condition(DEPTH - 1, what) -> g = DEPTH - 1 fi
#define IS(n, in) (phase[n] == in)

#define OPEN(n) (phase[n] == sending || phase[n] == combining)
#ifdef HALVES
#define MAY_BEGIN NO_FAULT
#else
#define MAY_BEGIN (NO_FAULT && !OPEN(0) && !OPEN(DEPTH - 1))
#endif
#ifdef DEATH
#define NO_FAULT (fault[me] == 0)
#else
#define NO_FAULT true
#endif

/* Rule 3: what dispatch needs of its generation. Without UNPAIRED, its last use was combined. */
#ifdef REUSE_EARLY
#define FREE(n) (phase[n] == unused || phase[n] == combining)
#elif defined(UNPAIRED)
#define FREE(n) (!OPEN(n))
#else
#define FREE(n) (phase[n] == unused)
#endif

/* Whether the program's next half may be this one of generation n. */
#define IS_TURN(n, half) \
  (MAY_BEGIN && phase[n] == received && NEXT_IS(half, eval(step[n])))

active [RANKS] proctype rank() {
  byte me = _pid;
  byte peer, g, which;
  mtype now;
  byte steps = 0, serial = 0; /* the next dispatch and plan */
  mtype phase[DEPTH] = unused;
  byte step[DEPTH] = NOTHING; /* that uses this generation */
  byte dispatch_epoch[DEPTH], combine_epoch[DEPTH], credit_epoch[DEPTH];
#ifdef RETURN_EARLY
  byte last_step;
#endif
#ifdef DEATH
  byte blamed;
#endif

  {
    do
    :: atomic {
         if /* one of all that it can do now */
#ifdef PLANS
         :: MAY_BEGIN && NEXT_IS(plan, _) -> which = serial; TAKE(plan, which); now = plan
#endif
#ifndef ONLY_PLANS
         :: MAY_BEGIN && FREE(steps % DEPTH) && NEXT_IS(dispatch, _) ->
            g = steps % DEPTH; which = steps; TAKE(dispatch, which); now = dispatch
#endif
         :: ANY(IS_TURN, combine) -> PICK(IS_TURN, combine); which = step[g];
            TAKE(combine, eval(which)); now = combine
#ifdef UNPAIRED
         :: ANY(IS_TURN, release) -> PICK(IS_TURN, release); which = step[g];
            TAKE(release, eval(which)); now = release
#endif
         :: ANY(IS, sending) -> PICK(IS, sending); which = step[g]; now = finish_dispatch
         :: ANY(IS, combining) -> PICK(IS, combining); which = step[g]; now = finish_combine
#ifdef DEATH
         :: fault[me] != 0 -> goto failed /* check() */
#endif
         fi;
         printf("rank %d: %e of %d, generation %d\n", me, now, which, g)
       };
       if
       :: now == plan -> exchange_counts()
       :: now == dispatch -> dispatch_begin()
       :: now == finish_dispatch -> dispatch_finish()
       :: now == combine -> combine_begin()
       :: now == finish_combine -> combine_finish()
       :: now == release -> release_rows()
       fi;
       d_step { g = 0; which = 0; peer = 0; now = 0 } /* forget what tells nothing apart */
    od;
#ifdef DEATH
    /* Window::root_of: whom does the one wait for that I wait for? Who waits for nobody, or for what
     * has come (so it is stopped), holds everybody up. */
find_root:
    atomic {
      blamed = peer;
      do
      :: waiting[blamed] == 0 -> break
      :: waiting[blamed] != 0 &&
         SIGNAL(blamed, word[blamed], waiting[blamed] - 1) == until[blamed] -> break
      :: else -> blamed = waiting[blamed] - 1
      od
    };
    /* Window::raise: the first cause stays. */
give_up:
    atomic {
      if
      :: fault[me] == 0 -> fault[me] = blamed + 1
      :: else
      fi
    };
#ifdef KEEP_QUIET /* who was told tells nobody */
    tell_all();
failed:
#else
failed:
    tell_all();
#endif
    assert(fault[me] == victim + 1); /* all survivors blame the right one */
    atomic { ended[me] = true; printf("rank %d throws\n", me) }
#endif
  }
#ifdef DEATH
  unless { victim == me }
#endif
}

/* ---- What befalls them ------------------------------------------------------------------------ */

#ifdef DEATH
active proctype death() {
  atomic {
    victim = 0; /* all ranks do the same, so it may be any */
    if
    :: ended[victim] = true; printf("rank %d ends\n", victim)
    :: printf("rank %d stops\n", victim) /* it has only stopped: nobody can tell but by the deadline */
    fi
  }
}
#endif

#ifdef ENDS /* after a death nobody goes on for ever */
#define OVER(r) (victim == (r) || ended[r])
ltl all_end { [] (victim != RANKS -> <> (OVER(0) && OVER(1) && OVER(RANKS - 1))) }
#endif

#ifdef OTHER_ORDER /* once, rank 1 begins what it should have begun later */
active proctype disorder() {
  mtype half;
  byte which;
end:
  atomic { len(todo[1]) > 1 -> todo[1]?half,which; todo[1]!half,which }
}
#endif
