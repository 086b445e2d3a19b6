#pragma once

// Looks around a first guess for the number of streamed experts with the shortest step: a step to
// one side and the other, on in a direction while it helps, then with half the stride. What a model
// of a layer cannot know (transfers that share PCIe, skewed experts, the first layer's copies that
// nothing hides) is in the measured steps.
//
//   search.Start(guess, most);
//   while (search.active()) { ... a step with search.k() ...; search.Add(its time of a row); }
//
// A trial takes kTrialSteps steps, of which the first is not counted: lanes are cut by the times of
// the step before. Pure logic. Thread safety: none.

namespace tandem::gpu {

class SplitSearch {
 public:
  static constexpr int kTrialSteps = 3;

  // REQUIRES: 1 <= guess <= most.
  void Start(int guess, int most);
  void Stop() { active_ = false; }
  bool active() const { return active_; }
  // To be tried while active, afterwards the best.
  int k() const { return k_; }
  // Of the best, of a row; 0 before any trial ended.
  double best_ns() const { return best_ns_; }
  // The time of a row in a step with k().
  void Add(double row_ns);

 private:
  void Judge(double mean_ns);
  // The next trial beside the best one, or the end.
  void Next();

  bool active_ = false;
  int most_ = 0;
  int best_ = 0;
  double best_ns_ = 0;
  int k_ = 0;
  int stride_ = 0;
  int direction_ = -1;
  bool moved_ = false;  // in this direction, with this stride
  int steps_ = 0;       // of the trial
  double sum_ns_ = 0;
};

}  // namespace tandem::gpu
