#include "placement/assignment.hpp"

#include <limits>

namespace wherry {

std::vector<std::size_t> cheapest_assignment(std::span<const std::int64_t> cost, std::size_t n) {
  constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();
  // Column n is where each row starts; row_of[c] == n means that column c is free.
  std::vector<std::int64_t> row_price(n, 0), column_price(n + 1, 0), distance(n + 1);
  std::vector<std::size_t> row_of(n + 1, n), previous(n + 1);
  std::vector<bool> done(n + 1);
  for (std::size_t row = 0; row < n; ++row) {
    distance.assign(n + 1, kFar);
    done.assign(n + 1, false);
    std::size_t column = n;
    row_of[n] = row;
    while (row_of[column] != n) {
      done[column] = true;
      const std::size_t from = row_of[column];
      std::size_t next = n;
      std::int64_t step = kFar;
      for (std::size_t c = 0; c < n; ++c) {
        if (done[c]) continue;
        const std::int64_t reduced = cost[from * n + c] - row_price[from] - column_price[c];
        if (reduced < distance[c]) {
          distance[c] = reduced;
          previous[c] = column;
        }
        if (distance[c] < step) {
          step = distance[c];
          next = c;
        }
      }
      for (std::size_t c = 0; c <= n; ++c) {
        if (done[c]) {
          row_price[row_of[c]] += step;
          column_price[c] -= step;
        } else if (distance[c] != kFar) {
          distance[c] -= step;
        }
      }
      column = next;
    }
    for (; column != n; column = previous[column]) row_of[column] = row_of[previous[column]];
  }
  std::vector<std::size_t> column_of(n);
  for (std::size_t c = 0; c < n; ++c) column_of[row_of[c]] = c;
  return column_of;
}

}  // namespace wherry
