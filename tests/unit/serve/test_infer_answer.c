/* test_infer_answer.c - what the API server says, as responses of KServe's protocol: both forms,
 * streamed or not, the final one, and errors. */
#include "shared/serve/grpc/infer_answer.h"

#include "tests/unit/serve/infer_message.h"

static struct infer_request request_of(enum infer_form form, bool empty_final)
{
    struct infer_request r = {
        .form = form,
        .outputs = INFER_TEXT_OUTPUT | INFER_FINISH_REASON,
        .empty_final = empty_final,
    };
    buf_add_c(&r.model, "model");
    buf_add_c(&r.id, "r-1");
    return r;
}

/* The response that has been made; it must be there. */
static struct message_answer take(struct infer_answer *a)
{
    CHECK(a->response.len > 0);
    struct message_answer m = message_read(buf_str(&a->response), a->is_stream);
    CHECK_EQ_STR(m.model.data, "model");
    CHECK_EQ_STR(m.id.data, "r-1");
    buf_release(&a->response);
    return m;
}

static void check_out(struct infer_answer *a, const char *text, int final)
{
    struct message_answer m = take(a);
    CHECK_EQ_INT(m.n_outputs, 1);
    CHECK_EQ_STR(m.names[0], "OUT");
    CHECK_EQ_STR(m.text[0].data, text);
    CHECK_EQ_INT(m.final, final);
    CHECK(!m.error.len);
    message_answer_release(&m);
}

TEST(native_items_are_lists_of_one_and_the_last_is_final)
{
    struct infer_request r = request_of(INFER_NATIVE, false);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add(&a, STR("{\"is_end\":0,\"token\":\"\\\"is_end\\\":1\"}"));
    check_out(&a, "[{\"is_end\":0,\"token\":\"\\\"is_end\\\":1\"}]", 0);
    infer_answer_add(&a, STR("{\"usage\":{\"is_end\":1},\"is_end\":0}"));
    check_out(&a, "[{\"usage\":{\"is_end\":1},\"is_end\":0}]", 0);
    infer_answer_add(&a, STR("{\"is_end\":1}"));
    check_out(&a, "[{\"is_end\":1}]", 1);
    infer_answer_end(&a);
    CHECK_EQ_INT(a.response.len, 0);
    CHECK(!a.failed);
    infer_answer_release(&a);
    infer_request_release(&r);
}

TEST(an_empty_response_is_the_final_one_where_it_is_wanted)
{
    struct infer_request r = request_of(INFER_NATIVE, true);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add(&a, STR("{\"is_end\":1}"));
    check_out(&a, "[{\"is_end\":1}]", 0);
    infer_answer_end(&a);
    struct message_answer m = take(&a);
    CHECK_EQ_INT(m.n_outputs, 0);
    CHECK_EQ_INT(m.final, 1);
    message_answer_release(&m);
    infer_answer_release(&a);
    infer_request_release(&r);
}

TEST(the_one_response_of_a_native_infer_is_its_last_item)
{
    struct infer_request r = request_of(INFER_NATIVE, false);
    struct infer_answer a;
    infer_answer_begin(&a, &r, false);
    infer_answer_add(&a, STR("{\"is_end\":0}"));
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_add(&a, STR("{\"is_end\":1,\"tokens_all\":\"x\"}"));
    infer_answer_end(&a);
    check_out(&a, "[{\"is_end\":1,\"tokens_all\":\"x\"}]", -1);
    infer_answer_release(&a);
    infer_request_release(&r);
}

/* Of this layer: as the API server writes its own. */
TEST(errors_of_a_request_that_was_not_begun)
{
    struct infer_request r = request_of(INFER_NATIVE, true);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add_error(&a, ERR_INVALID, "no list");
    struct message_answer m = take(&a);
    CHECK(strncmp(m.text[0].data,
                  "{\"req_id\":\"r-1\",\"error_msg\":\"no list\",\"error_code\":400,", 54) == 0);
    CHECK_EQ_INT(m.final, 0);
    message_answer_release(&m);
    infer_answer_end(&a);
    m = take(&a);
    CHECK_EQ_INT(m.final, 1);
    message_answer_release(&m);
    infer_answer_release(&a);
    r.form = INFER_NO_FORM; /* nobody knows what its client understands */
    infer_answer_begin(&a, &r, true);
    infer_answer_add_error(&a, ERR_INVALID, "no input");
    m = take(&a);
    CHECK_EQ_STR(m.error.data, "no input");
    CHECK_EQ_INT(m.final, 1);
    message_answer_release(&m);
    infer_answer_end(&a);
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_release(&a);
    infer_request_release(&r);
}

TEST(native_errors_are_the_object_itself)
{
    static const char error[] = "{\"req_id\":\"r\",\"error_msg\":\"too long\",\"error_code\":429}";
    struct infer_request r = request_of(INFER_NATIVE, false);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add_whole(&a, 429, STR(error));
    check_out(&a, error, 1);
    CHECK_EQ_INT(a.code, GRPC_RESOURCE_EXHAUSTED);
    infer_answer_release(&a);
    infer_answer_begin(&a, &r, true);
    infer_answer_add(&a, STR("{\"is_end\":0}"));
    check_out(&a, "[{\"is_end\":0}]", 0);
    infer_answer_add(&a, STR(error)); /* within its answer */
    check_out(&a, error, 1);
    infer_answer_end(&a);
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_release(&a);
    infer_answer_begin(&a, &r, false);
    infer_answer_add_whole(&a, 429, STR(error));
    infer_answer_end(&a);
    CHECK(a.failed && a.code == GRPC_RESOURCE_EXHAUSTED);
    CHECK_EQ_STR(a.why.data, "too long");
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_release(&a);
    infer_request_release(&r);
}

static void check_text(struct infer_answer *a, const char *text, const char *reason, int final)
{
    struct message_answer m = take(a);
    CHECK_EQ_INT(m.n_outputs, 2);
    CHECK_EQ_STR(m.names[0], "text_output");
    CHECK_EQ_STR(m.names[1], "finish_reason");
    CHECK_EQ_STR(m.text[0].len ? m.text[0].data : "", text);
    CHECK_EQ_STR(m.text[1].len ? m.text[1].data : "", reason);
    CHECK_EQ_INT(m.final, final);
    message_answer_release(&m);
}

#define CHUNK(text, reason) "{\"choices\":[{\"text\":\"" text "\",\"finish_reason\":" reason "}]}"

TEST(completions_are_text_and_reason)
{
    struct infer_request r = request_of(INFER_TEXT, false);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add(&a, STR(CHUNK("He", "null")));
    check_text(&a, "He", "", 0);
    infer_answer_add(&a, STR("{\"choices\":[],\"usage\":{}}")); /* says nothing of the text */
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_add(&a, STR(CHUNK("llo", "\"stop\"")));
    check_text(&a, "llo", "stop", 1);
    infer_answer_add(&a, STR("[DONE]"));
    infer_answer_end(&a);
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_release(&a);
    infer_answer_begin(&a, &r, false);
    infer_answer_add_whole(&a, 200, STR(CHUNK("Hello", "\"length\"")));
    infer_answer_end(&a);
    check_text(&a, "Hello", "length", -1);
    infer_answer_release(&a);
    r.outputs = INFER_TEXT_OUTPUT;
    infer_answer_begin(&a, &r, false);
    infer_answer_add_whole(&a, 200, STR(CHUNK("Hello", "\"length\"")));
    struct message_answer m = take(&a);
    CHECK_EQ_INT(m.n_outputs, 1);
    message_answer_release(&m);
    infer_answer_release(&a);
    infer_request_release(&r);
}

TEST(errors_of_completions_are_error_messages)
{
    static const char error[] = "{\"error\":{\"message\":\"no room\",\"code\":\"full\"}}";
    struct infer_request r = request_of(INFER_TEXT, false);
    struct infer_answer a;
    infer_answer_begin(&a, &r, true);
    infer_answer_add_whole(&a, 429, STR(error));
    struct message_answer m = take(&a);
    CHECK_EQ_STR(m.error.data, "no room");
    CHECK_EQ_INT(m.final, 1);
    message_answer_release(&m);
    infer_answer_end(&a);
    CHECK_EQ_INT(a.response.len, 0);
    infer_answer_release(&a);
    infer_answer_begin(&a, &r, false);
    infer_answer_add_whole(&a, 503, STR(error));
    infer_answer_end(&a);
    CHECK(a.failed && a.code == GRPC_UNAVAILABLE);
    CHECK_EQ_STR(a.why.data, "no room");
    infer_answer_release(&a);
    infer_answer_begin(&a, &r, false);
    infer_answer_add_whole(&a, 500, STR("not JSON")); /* nobody sends it; it is an error too */
    CHECK(a.failed && a.code == GRPC_INTERNAL && a.why.len);
    infer_answer_release(&a);
    infer_request_release(&r);
}

TEST_MAIN(CASE(native_items_are_lists_of_one_and_the_last_is_final),
          CASE(an_empty_response_is_the_final_one_where_it_is_wanted),
          CASE(the_one_response_of_a_native_infer_is_its_last_item),
          CASE(errors_of_a_request_that_was_not_begun), CASE(native_errors_are_the_object_itself),
          CASE(completions_are_text_and_reason), CASE(errors_of_completions_are_error_messages))
