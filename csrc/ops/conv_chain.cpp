// xopt::conv_chain: convolutions one after the other, each as xopt::conv does it. To hand over the arguments of one costs
// Python and torch as much as a convolution of a small image takes; here those of all are a list of numbers.
#include <string_view>

#include "ops/check.h"
#include "ops/conv_call.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "conv_chain";

template <class T>
StableIValue stable(const T& value) {
  return torch::stable::detail::from(value);
}
template <class T>
T owned(StableListHandle list) {
  return torch::stable::detail::to<T>(stable(list));
}

// The numbers of the chain's links, taken off one by one.
class Numbers {
 public:
  explicit Numbers(const std::vector<int64_t>& numbers) : numbers_(numbers) {}

  bool at_end() const { return next_ == numbers_.size(); }
  int64_t take() { return take(1)[0]; }
  std::vector<int64_t> take(int64_t count) {
    if (static_cast<int64_t>(numbers_.size() - next_) < count) fail(kOp, "links", "expected more numbers, got ", next_);
    const auto first = numbers_.begin() + static_cast<std::ptrdiff_t>(next_);
    next_ += static_cast<size_t>(count);
    return {first, first + count};
  }

 private:
  const std::vector<int64_t>& numbers_;
  size_t next_ = 0;
};

// Words with a space between.
class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}

  std::string take() {
    if (rest_.empty()) fail(kOp, "names", "expected an activation and a binary for each link");
    const size_t end = rest_.find(' ');
    std::string word(rest_.substr(0, end));
    rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end + 1);
    return word;
  }

 private:
  std::string_view rest_;
};

// The arguments of one xopt::conv. Tensors are told by their place among the chain's, or after those by the number of
// the link that they are the result of; -1: none.
struct Link {
  int64_t input, packed, bias, scale, other;
  int64_t groups, activation_last, out_dtype;
  std::vector<int64_t> weight_size, stride, padding, dilation;
  std::string activation, binary;
  double alpha, beta;

  Link(Numbers* numbers, Words* names, double first, double second)
      : input(numbers->take()),
        packed(numbers->take()),
        bias(numbers->take()),
        scale(numbers->take()),
        other(numbers->take()),
        groups(numbers->take()),
        activation_last(numbers->take()),
        out_dtype(numbers->take()),
        activation(names->take()),
        binary(names->take()),
        alpha(first),
        beta(second) {
    const int64_t dims = numbers->take();
    if (dims < 1 || dims > 3) fail(kOp, "links", "expected 1 to 3 spatial dimensions, got ", dims);
    if (out_dtype < 0 || out_dtype >= static_cast<int64_t>(kFloating.size())) {
      fail(kOp, "links", "expected the number of a dtype below ", kFloating.size(), ", got ", out_dtype);
    }
    weight_size = numbers->take(dims + 2);
    stride = numbers->take(dims);
    padding = numbers->take(2 * dims);
    dilation = numbers->take(dims);
  }
};

class Chain {
 public:
  Chain(const Tensors& tensors, const std::vector<int64_t>& links, const std::vector<double>& parameters,
        std::string_view names, const std::vector<int64_t>& wanted)
      : tensors_(tensors) {
    Numbers numbers(links);
    Words words(names);
    while (!numbers.at_end()) {
      const size_t at = 2 * links_.size();
      if (at + 2 > parameters.size()) {
        fail(kOp, "parameters", "expected 2 for each link, got ", parameters.size());
      }
      links_.emplace_back(&numbers, &words, parameters[at], parameters[at + 1]);
    }
    results_.resize(links_.size());
    last_use_.assign(links_.size(), -1);
    for (int64_t i = 0; i < count(); ++i) {
      for (const int64_t place : {links_[index(i)].input, links_[index(i)].other}) {
        if (place >= tensors_.size() && place < tensors_.size() + i) last_use_[index(place - tensors_.size())] = i;
      }
    }
    for (const int64_t result : wanted) {
      if (result < 0 || result >= count()) {
        fail(kOp, "wanted", "expected numbers of links below ", count(), ", got ", result);
      }
      last_use_[index(result)] = count();
    }
  }

  void run() {
    for (int64_t i = 0; i < count(); ++i) {
      run_link(i);
      for (int64_t before = 0; before <= i; ++before) {
        if (last_use_[index(before)] <= i) results_[index(before)] = Tensor();
      }
    }
  }

  AtenTensorHandle result(int64_t i) const { return results_[index(i)].share(); }

 private:
  static size_t index(int64_t i) { return static_cast<size_t>(i); }
  int64_t count() const { return static_cast<int64_t>(links_.size()); }

  // One of the call's tensors, or after them the result of an earlier link.
  Tensor tensor(int64_t place, int64_t link) const {
    if (place < 0 || place >= tensors_.size() + link) {
      fail(kOp, "links", "expected places of the ", tensors_.size(), " tensors or of results before link ", link,
           ", got ", place);
    }
    const Tensor& found = place < tensors_.size() ? tensors_[place] : results_[index(place - tensors_.size())];
    return Tensor(found.share());
  }
  Tensor optional_tensor(int64_t place, int64_t link) const { return place == -1 ? Tensor() : tensor(place, link); }

  void run_link(int64_t i) {
    const Link& link = links_[index(i)];
    Tensor input = tensor(link.input, i), packed = tensor(link.packed, i), bias = optional_tensor(link.bias, i),
           scale = optional_tensor(link.scale, i), other = optional_tensor(link.other, i);
    const auto given = [](Tensor& tensor) {
      return stable(tensor ? std::optional<AtenTensorHandle>(tensor.release()) : std::nullopt);
    };
    // In the order of xopt::conv's schema. It owns them from here on.
    StableIValue stack[] = {stable(input.release()),
                            stable(packed.release()),
                            stable(link.weight_size),
                            given(bias),
                            stable(link.stride),
                            stable(link.padding),
                            stable(link.dilation),
                            stable(link.groups),
                            given(scale),
                            stable(link.activation),
                            stable(link.alpha),
                            stable(link.beta),
                            stable(link.binary),
                            given(other),
                            stable(link.activation_last != 0),
                            stable(std::optional<int32_t>(dtype_to_torch(kFloating.begin()[link.out_dtype])))};
    conv(stack, std::size(stack), 1);
    results_[index(i)] = Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  }

  const Tensors& tensors_;
  std::vector<Link> links_;
  std::vector<Tensor> results_;
  std::vector<int64_t> last_use_;
};

struct ChainArguments {
  explicit ChainArguments(Stack stack)
      : tensors(stack.tensors()),
        links(owned<std::vector<int64_t>>(stack.integers())),
        parameters(owned<std::vector<double>>(stack.numbers())),
        names(stack.string()),
        wanted(owned<std::vector<int64_t>>(stack.integers())) {}

  Tensors tensors;
  std::vector<int64_t> links;
  std::vector<double> parameters;
  String names;
  std::vector<int64_t> wanted;
};

void conv_chain(StableIValue* stack, uint64_t, uint64_t) {
  const ChainArguments given{Stack(stack)};
  Chain chain(given.tensors, given.links, given.parameters, given.names.text(), given.wanted);
  chain.run();
  StableListHandle results = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(given.wanted.size(), &results));
  for (const int64_t result : given.wanted) {
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(results, stable(chain.result(result))));
  }
  stack[0] = stable(results);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("conv_chain(Tensor[] tensors, int[] links, float[] parameters, str names, int[] wanted) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("conv_chain", &conv_chain); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("conv_chain", &on_xpu<conv_chain, First::list>); }

}  // namespace xopt::ops
